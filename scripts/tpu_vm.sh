# The scripts for Cloud TPU VMs source this file, which reads the options, finds the workers and calls gcloud for each.
# shellcheck shell=bash

program=$(basename "$0")
tpu_name='' tpu_zone='' tpu_project='' tpu_worker=all tpu_folder=grpo
LC_ALL=C # ranges such as [a-z] contain only these letters
workers=()
scratch=''

refuse() { # reports bad input with exit code 2, like grpo
    printf '%s: %s\n' "$program" "$*" >&2
    exit 2
}

fail() {
    printf '%s: %s\n' "$program" "$*" >&2
    exit 1
}

# Prints the comment at the head of the script as its help.
show_help() {
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
}

# tpu_option OPTION VALUE: reads an option that identifies the TPU; fails for any other option.
tpu_option() {
    case $1 in
        --name) tpu_name=$2 ;;
        --zone) tpu_zone=$2 ;;
        --project) tpu_project=$2 ;;
        --folder) tpu_folder=$2 ;;
        *) return 1 ;;
    esac
}

# read_options ARGUMENTS...: reads the options of a script for all workers; `own_option OPTION VALUE` reads additional
# ones and fails for any other.
# shellcheck disable=SC2034  # the script that sources this reads dry_run
read_options() {
    dry_run=false
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help) show_help && exit ;;
            --dry-run) dry_run=true && shift && continue ;;
            --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        esac
        case $1 in
            --worker) tpu_worker=${2-} ;;
            *) own_option "$1" "${2-}" || tpu_option "$1" "${2-}" ||
                refuse "unknown argument $(printf '%q' "$1"); --help lists them." ;;
        esac
        [ $# -ge 2 ] || refuse "$1 needs a value."
        shift 2
    done
}

require() { # OPTION VALUE PATTERN WHAT: the whole value matches the pattern
    [ -n "$2" ] || refuse "$1 is missing ($4)."
    [[ $2 =~ ^($3)$ ]] || refuse "$1 is $(printf '%q' "$2"); expected $4."
}

# Checks names before any command: gcloud would read a name with a leading dash as an option, and split one at a space.
check_tpu() {
    require --name "$tpu_name" '([a-z_][a-z0-9_-]{0,31}@)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?' \
        "a TPU's name, perhaps as USER@NAME: a small letter, then small letters, digits and dashes, at most 63"
    require --zone "$tpu_zone" '[a-z][a-z0-9]*(-[a-z0-9]+)+' "a zone such as us-central2-b"
    [ -z "$tpu_project" ] ||
        require --project "$tpu_project" '([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]' "a project's id such as my-project-1"
    require --folder "$tpu_folder" '[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*' \
        "a folder below the home directory there, such as grpo"
    require --worker "$tpu_worker" 'all|0|[1-9][0-9]{0,3}' "a worker's number, or all"
    command -v gcloud >/dev/null ||
        refuse "gcloud is not on PATH. Install the Google Cloud CLI and run: gcloud auth login"
}

make_scratch() {
    scratch=$(mktemp -d) || fail "cannot make a temporary folder."
    trap 'rm -rf "$scratch"' EXIT
}

# tpu SUBCOMMAND ARGUMENTS...: runs one command of `gcloud compute tpus tpu-vm` in the TPU's zone and project.
tpu() {
    local subcommand=$1
    shift
    gcloud compute tpus tpu-vm "$subcommand" "$@" --zone="$tpu_zone" ${tpu_project:+"--project=$tpu_project"} --quiet
}

# on_worker NUMBER COMMAND: runs the command on a worker; a lost connection ends within a minute.
on_worker() {
    tpu ssh "$tpu_name" --worker="$1" --ssh-flag='-oConnectTimeout=20' --ssh-flag='-oServerAliveInterval=15' \
        --ssh-flag='-oServerAliveCountMax=4' --command="$2"
}

to_worker() { # NUMBER FILE NAME: copies the file to the worker's home directory; a new file gets the same mode
    tpu scp "$2" "$tpu_name:$3" --worker="$1" --scp-flag='-oConnectTimeout=20'
}

# remote_command SCRIPT ARGUMENTS...: prints a line for the worker's shell that runs the script with these arguments.
remote_command() {
    printf 'bash -c'
    printf ' %q' "$@"
}

# Sets `workers`; fails if the TPU does not exist.
find_workers() {
    local line state addresses number=0
    line=$(tpu describe "${tpu_name#*@}" --format='value(state,networkEndpoints[].ipAddress)') ||
        fail "gcloud cannot describe the TPU $tpu_name in $tpu_zone; its reason is above."
    IFS=$'\t' read -r state addresses <<<"$line"
    [ "$state" = READY ] || fail "the TPU $tpu_name is ${state:-unknown to gcloud}, not READY."
    [ -n "$addresses" ] || fail "gcloud names no worker of the TPU $tpu_name."
    workers=()
    while IFS= read -r _; do
        workers+=("$number")
        number=$((number + 1))
    done < <(tr ';' '\n' <<<"$addresses")
    [ "$tpu_worker" = all ] && return
    [ "$tpu_worker" -lt "$number" ] ||
        refuse "--worker is $tpu_worker, but the TPU $tpu_name has workers 0 to $((number - 1))."
    workers=("$tpu_worker")
}

# The first call of gcloud creates and copies the SSH key, and two first calls at once would collide. Problems of the
# worker are reported by later calls.
first_contact() {
    on_worker "${workers[0]}" true >/dev/null 2>&1 </dev/null || true
}

# each_worker FUNCTION: calls the function for all workers at the same time and prints each result.
each_worker() {
    local index worker pids=() failed=()
    for worker in "${workers[@]}"; do
        ("$1" "$worker") >"$scratch/$worker.out" 2>&1 </dev/null &
        pids+=($!)
    done
    for index in "${!workers[@]}"; do
        worker=${workers[index]}
        if wait "${pids[index]}"; then
            printf 'worker %s: %s\n' "$worker" "$(tail -n 1 "$scratch/$worker.out")"
        else
            printf 'worker %s: FAILED\n' "$worker"
            tail -n 5 "$scratch/$worker.out" | sed 's/^/    /' >&2
            failed+=("$worker")
        fi
    done
    [ "${#failed[@]}" -eq 0 ] && return
    fail "failed on worker ${failed[*]} of $tpu_name; $((${#workers[@]} - ${#failed[@]})) of ${#workers[@]} are done. Run it again."
}
