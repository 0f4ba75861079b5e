#!/usr/bin/env bash
# Copies this checkout to every worker of a Cloud TPU VM and installs it in a .venv there, with the extras [tpu,gcs].
# Running it again sends the newest commit and skips unchanged parts.
#
#   bash scripts/setup_tpu_vm.sh --name TPU --zone ZONE [options]
#
#   --project ID    Google Cloud project (default: gcloud's own)
#   --worker N      only this worker (default: all)
#   --folder NAME   folder in the worker's home directory (default: grpo)
#   --python NAME   interpreter on the worker, python3.11 or python3.12 (default: the first that is installed; if
#                   there is none, python3.11 is installed with apt)
#   --extras NAMES  further extras of the package, such as math,qlora
#   --dry-run       prints what would be sent and done; only asks gcloud for the list of workers
#
# The last commit is sent, so that every worker gets the same code. Files that the commit no longer contains are
# removed there; .env, .venv, runs/ and your own files are kept. Exit code 2: the input is unusable; 1: a worker
# failed and is named.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tpu_vm.sh"

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python='' extras=tpu,gcs
own_option() {
    case $1 in
        --python) python=$2 ;;
        --extras) extras=tpu,gcs,$2 ;;
        *) return 1 ;;
    esac
}
read_options "$@"
check_tpu
[ -z "$python" ] || require --python "$python" 'python3\.1[12]' "python3.11 or python3.12"
require --extras "$extras" '[a-z0-9]+(,[a-z0-9]+)*' "names of extras, such as math,qlora"

# The list of unpacked files is kept, so that the next commit can remove the files that it no longer contains.
# shellcheck disable=SC2016  # the worker's shell expands it
INSTALL='
set -eu
archive=$HOME/$1 folder=$HOME/$2 python=$3 commit=$4 extras=$5
trap "rm -f -- \"\$archive\"" EXIT
if [ -e "$HOME/.grpo-launch" ] && ! flock -n "$HOME/.grpo-launch" true; then
    echo "a launch still runs on this worker; end it first: launch_on_tpu_vm.sh --stop" >&2
    exit 1
fi
if [ -z "$python" ]; then
    for python in python3.11 python3.12 ""; do
        [ -z "$python" ] || ! "$python" -c "import ensurepip, venv" 2>/dev/null || break
    done
fi
if [ -z "$python" ] || ! "$python" -c "import ensurepip, venv" 2>/dev/null; then
    python=${python:-python3.11}
    sudo DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 update >&2
    sudo DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y "$python" "$python-venv" >&2
fi
mkdir -p -- "$folder"
cd -- "$folder"
tar -tzf "$archive" | LC_ALL=C sort >.files.new
if [ -e .files ]; then
    LC_ALL=C comm -23 .files .files.new | while IFS= read -r file; do [ -d "$file" ] || rm -f -- "$file"; done
fi
tar -xzf "$archive"
mv -f .files.new .files
PYTHON=$python bash -c "set -euo pipefail; source scripts/environment.sh; make_environment $extras" >&2
echo "$(.venv/bin/grpo --version), commit $commit, in $folder"
'

install_on() { # WORKER
    if ! to_worker "$1" "$scratch/source.tar.gz" "$incoming"; then
        on_worker "$1" "rm -f -- $incoming" || true
        return 1
    fi
    on_worker "$1" "$(remote_command "$INSTALL" install "$incoming" "$tpu_folder" "$python" "$commit" "$extras")"
}

commit=$(git -C "$repository" rev-parse --short HEAD 2>/dev/null) ||
    refuse "$repository is not a git checkout; the last commit is what is sent."
make_scratch
git -C "$repository" archive --format=tar.gz -o "$scratch/source.tar.gz" HEAD
find_workers

changed=$(git -C "$repository" status --porcelain | wc -l)
[ "$changed" -eq 0 ] || echo "not sent: $((changed)) files with changes that are not committed (git status lists them)"
if [ "$dry_run" = true ]; then
    echo "would send commit $commit ($(wc -c <"$scratch/source.tar.gz" | tr -d ' ') bytes) to worker ${workers[*]} of $tpu_name,"
    echo "unpack it in ~/$tpu_folder and install it with [$extras] in ~/$tpu_folder/.venv (${python:-python3.11 or python3.12})"
    exit
fi
echo "sending commit $commit to worker ${workers[*]} of $tpu_name and installing it in ~/$tpu_folder; minutes the first time"
incoming=.grpo-incoming-$(date +%Y%m%d-%H%M%S)-$$.tar.gz
first_contact
each_worker install_on
