#!/usr/bin/env bash
# Copies the API keys of a .env file, and nothing else, to every worker of a Cloud TPU VM.
#
#   bash scripts/sync_env_to_tpu_vm.sh --name TPU --zone ZONE [options]
#
#   --project ID    Google Cloud project (default: gcloud's own)
#   --worker N      only this worker (default: all)
#   --env FILE      file to copy (default: .env in the working directory)
#   --folder NAME   folder in the worker's home directory in which grpo is started (default: grpo)
#   --dry-run       prints what would be copied and where; only asks gcloud for the list of workers
#
# Only you may have access to the file (chmod 600). The script copies the variables that grpo takes from a .env,
# WANDB_API_KEY and HF_TOKEN; on the worker, the file has mode 0600 and is replaced at once. Values are never printed
# and appear on no command line. Exit code 2: the input is unusable; 1: a worker failed and is named.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tpu_vm.sh"
set +x # a trace of this script would print values

TAKEN=(WANDB_API_KEY HF_TOKEN)

file=.env
own_option() {
    case $1 in
        --env) file=$2 ;;
        *) return 1 ;;
    esac
}
read_options "$@"
check_tpu

check_file() {
    local mode
    [ ! -L "$file" ] || refuse "$file is a symbolic link; expected the file itself."
    [ -e "$file" ] || refuse "$file does not exist. Copy .env.example to .env and fill it in, or name one: --env FILE"
    [ -f "$file" ] || refuse "$file is not a regular file."
    [ -r "$file" ] || refuse "$file cannot be read."
    mode=$(ls -ld -- "$file")
    [ "${mode:4:6}" = ------ ] || refuse "$file holds secrets and other users have access to it (${mode:0:10}); run: chmod 600 $file"
}

# take_names FILE: writes the lines to copy to FILE, their names to `names`, other names to `left_out`, and the number of
# names that must not be printed to `num_unnamed`.
take_names() {
    local line name value number=0
    local assignment='^[[:space:]]*(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*)[[:space:]]*=[[:space:]]*(.*)$'
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1))
        line=${line%$'\r'}
        [[ $line =~ ^[[:space:]]*(#.*)?$ ]] && continue
        # The line itself is never printed, because it may be a key without its name.
        [[ $line =~ $assignment ]] || refuse "line $number of $file is not NAME=VALUE with a name of letters, digits and _."
        name=${BASH_REMATCH[2]} value=${BASH_REMATCH[3]}
        case $value in
            \"*\"* | \'*\'* | [!\"\']* | '') ;;
            *) refuse "line $number of $file: a value in quotes must end on its line." ;;
        esac
        if [[ " ${TAKEN[*]} " != *" $name "* ]]; then
            # What does not look like a name may be a key in base64, which ends with =.
            if [[ $name =~ ^[A-Z][A-Z0-9_]*$ ]]; then left_out+=("$name"); else num_unnamed=$((num_unnamed + 1)); fi
        elif [ -n "$value" ]; then
            printf '%s\n' "$line" >>"$1"
            names+=("$name")
        fi
    done <"$file"
}

# shellcheck disable=SC2016  # the worker's shell expands it
PUT='
set -eu
umask 077
incoming=$HOME/$1 folder=$HOME/$2
trap "rm -f -- \"\$incoming\"" EXIT
mkdir -p -- "$folder"
[ ! -d "$folder/.env" ] || { echo "$folder/.env is a folder" >&2; exit 1; }
chmod 600 -- "$incoming"
mv -f -- "$incoming" "$folder/$1"
mv -fT -- "$folder/$1" "$folder/.env"
echo "$folder/.env, mode $(stat -c %a -- "$folder/.env")"
'

put_on() { # WORKER
    if ! to_worker "$1" "$scratch/env" "$incoming"; then
        on_worker "$1" "rm -f -- $incoming" || true
        return 1
    fi
    on_worker "$1" "$(remote_command "$PUT" put "$incoming" "$tpu_folder")"
}

check_file
make_scratch
umask 077
names=() left_out=() num_unnamed=0
: >"$scratch/env"
take_names "$scratch/env"
[ "${#names[@]}" -gt 0 ] || refuse "$file sets none of ${TAKEN[*]}; nothing else is copied."
find_workers

[ "$num_unnamed" -eq 0 ] || left_out+=("$num_unnamed other name(s)")
[ "${#left_out[@]}" -eq 0 ] || echo "not copied, since grpo takes only ${TAKEN[*]} from a .env: ${left_out[*]}"
if [ "$dry_run" = true ]; then
    echo "would copy ${names[*]} from $file to ~/$tpu_folder/.env on worker ${workers[*]} of $tpu_name"
    exit
fi
echo "copying ${names[*]} from $file to ~/$tpu_folder/.env on worker ${workers[*]} of $tpu_name"
incoming=.env.incoming-$(date +%Y%m%d-%H%M%S)-$$
first_contact
each_worker put_on
