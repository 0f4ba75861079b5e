#!/usr/bin/env bash
# Runs the same command on every worker of a Cloud TPU VM, and ends it on all workers if it fails on one.
#
#   bash scripts/launch_on_tpu_vm.sh --name TPU --zone ZONE [options] -- grpo train --config PRESET
#   bash scripts/launch_on_tpu_vm.sh --name TPU --zone ZONE --stop
#
#   --project ID    Google Cloud project (default: gcloud's own)
#   --folder NAME   folder in the worker's home directory with the .venv of setup_tpu_vm.sh (default: grpo)
#   --logs DIR      folder for worker_0.log, worker_1.log, ... (default: launches/TPU-TIME in the working directory)
#   --show          also prints every line here after the number of its worker
#   --restarts N    starts the command again, N times at most, if the first worker that failed ended with a temporary
#                   error: 70 (watchdog), 75 (preempted), 134 (lost another host), 137 (killed), 143 (preempted during
#                   startup), 76 or 255 (connection lost), and no worker ended with 2 (unusable input).
#                   `grpo train` continues with --resume auto (default: 0)
#   --wait S        seconds before the command is started again (default: 10)
#   --settle S      seconds in which the other workers may end by themselves after one has failed (default: 5)
#   --grace S       seconds from TERM to KILL (default: 120); a step and its checkpoint must take less
#   --limit S       seconds after which every worker is stopped with TERM (default: 0, never)
#   --stop          only stops the programs that an earlier launch left running
#   --dry-run       prints the gcloud commands instead of running them
#
# Ctrl-C and SIGTERM are forwarded to all workers, which save and end; a second signal kills them. A closed terminal
# counts as SIGTERM.
# The exit code is the code of the first worker that failed (124: --limit was reached), or 0 if all succeeded.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tpu_vm.sh"

POLL_S=0.2
logs='' show=false restarts=0 wait_s=10 settle_s=5 grace_s=120 limit_s=0 stop_only=false dry_run=false
while [ $# -gt 0 ]; do
    case $1 in
        --) shift && break ;;
        -h | --help) show_help && exit ;;
        --show) show=true && shift && continue ;;
        --stop) stop_only=true && shift && continue ;;
        --dry-run) dry_run=true && shift && continue ;;
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
        --logs) logs=${2-} ;;
        --restarts) restarts=${2-} ;;
        --wait) wait_s=${2-} ;;
        --settle) settle_s=${2-} ;;
        --grace) grace_s=${2-} ;;
        --limit) limit_s=${2-} ;;
        *) tpu_option "$1" "${2-}" || refuse "unknown argument $(printf '%q' "$1"); the command follows --; --help lists the options." ;;
    esac
    [ $# -ge 2 ] || refuse "$1 needs a value."
    shift 2
done
command=("$@")

check_launch() {
    local option word previous=''
    for option in "--restarts $restarts" "--wait $wait_s" "--settle $settle_s" "--grace $grace_s" "--limit $limit_s"; do
        require "${option%% *}" "${option#* }" '0|[1-9][0-9]{0,5}' "a whole number"
    done
    [ "$stop_only" = true ] && return
    [ "${#command[@]}" -gt 0 ] || refuse "nothing to run. The command follows --, as in: -- grpo train --config PRESET"
    [ "$restarts" -gt 0 ] || return 0
    for word in "${command[@]}"; do
        case "$previous $word" in
            "--resume never" | *" --resume=never") refuse "--restarts and --resume never exclude each other; leave --resume out." ;;
        esac
        previous=$word
    done
}

# This script runs on a worker. The lock file names process and tag of the newest launch, and is locked during the run.
# gcloud repeats a command after a lost connection, so a known tag is not started again.
# The shell waits for `timeout`, so that a signal gives an exit code (134, 137) instead of a broken connection, and
# then kills processes that the program left behind, which would keep the devices.
# shellcheck disable=SC2016  # the worker's shell expands it
START='
tag=$1 folder=$2 grace=$3 limit=$4
shift 4
cd -- "$HOME/$folder" || { echo "run setup_tpu_vm.sh first" >&2; exit 2; }
export PATH="$PWD/.venv/bin:$PATH" PYTHONUNBUFFERED=1
lock=$HOME/.grpo-launch
exec 9>>"$lock"
locked=false
flock -n 9 && locked=true
read -r pid seen <"$lock" || true
if [ "$seen" = "$tag" ]; then
    echo "the connection to this worker was lost" >&2
    exit 76
fi
if [ "$locked" = false ]; then
    echo "process $pid of another launch ($seen) still runs on this worker; end it with --stop" >&2
    exit 2
fi
(
    echo "$BASHPID $tag" >"$lock"
    exec setsid timeout --foreground -k "$grace" "$limit" "$@"
)
status=$?
read -r pid seen <"$lock"
kill -s KILL -- "-$pid" 2>/dev/null
exit "$status"
'

# Ends the program that START runs: the program gets the signal once; after the grace its process group gets KILL.
# A launch that has not started yet finds that its tag is used. An empty tag means any launch.
# shellcheck disable=SC2016
STOP='
tag=$1 signal=$2 grace=$3
lock=$HOME/.grpo-launch
exec 9>>"$lock"
if flock -n 9; then
    [ -z "$tag" ] || echo "- $tag" >"$lock"
    echo "nothing runs"
    exit 0
fi
read -r pid seen <"$lock"
if [ -n "$tag" ] && [ "$seen" != "$tag" ]; then
    echo "not stopped: another launch ($seen) is running"
    exit 0
fi
if [ "$signal" != KILL ]; then
    kill -s "$signal" "$pid"
    flock -w "$((grace + 5))" 9 && { echo "stopped by $signal"; exit 0; }
fi
kill -s KILL -- "-$pid"
flock -w 10 9 || { echo "process group $pid outlives KILL" >&2; exit 1; }
echo "killed"
'

say() {
    printf '%s: %s\n' "$program" "$*" >&2 || true # the terminal may be gone
}

# A trapped signal interrupts this wait at once, unlike a sleep in the foreground.
pause() {
    sleep "$1" &
    wait $! || true
}

start_command() { # TAG COMMAND...
    remote_command "$START" launch "$1" "$tpu_folder" "$grace_s" "$limit_s" "${@:2}"
}

with_number() { # WORKER
    local line
    while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

run_worker() { # WORKER LINE: appends its exit code to $scratch/ended, which lists the workers in the order of their ends
    local status=0
    if [ "$show" = true ]; then
        {
            on_worker "$1" "$2" 2>&1 </dev/null || status=$?
            echo "$status" >"$scratch/$1.status"
        } | tee -a "$logs/worker_$1.log" | with_number "$1" || true
        status=$(cat "$scratch/$1.status")
    else
        on_worker "$1" "$2" >>"$logs/worker_$1.log" 2>&1 </dev/null || status=$?
    fi
    echo "$1 $status" >>"$scratch/ended"
}

# shellcheck disable=SC2317,SC2329  # called by each_worker
stop_worker() { # WORKER
    on_worker "$1" "$(remote_command "$STOP" stop "$tag" "$stop_signal" "$grace_s")"
}

stop_all() { # SIGNAL, in the background
    stop_signal=$1
    (each_worker stop_worker) >>"$logs/stop.log" 2>&1 &
    stop_jobs+=($!)
    [ "$kill_at" -gt 0 ] || kill_at=$((SECONDS + grace_s + 60))
}

ended() {
    wc -l <"$scratch/ended"
}

first_bad() { # prints the exit code of the first worker that failed, or nothing
    awk '$2 != 0 { print $2; exit }' "$scratch/ended"
}

# A job that ended without an exit code counts as a lost connection; with `kill`, running jobs are killed first.
note_lost_jobs() {
    local index
    for index in "${!jobs[@]}"; do
        [ "${1-}" != kill ] || kill -s KILL -- "-${jobs[index]}" 2>/dev/null || true
        [ "${1-}" != kill ] && kill -s 0 "${jobs[index]}" 2>/dev/null && continue
        grep -q "^${workers[index]} " "$scratch/ended" || echo "${workers[index]} 255" >>"$scratch/ended"
    done
}

# run_once COMMAND...: runs the command once on every worker. `by_itself` lists the workers that ended without a stop.
run_once() {
    local worker line handled=0 stop_at=0
    jobs=() stop_jobs=() kill_at=0 by_itself=''
    : >"$scratch/ended"
    line=$(start_command "$tag" "$@")
    for worker in "${workers[@]}"; do
        printf '%s: %s\n' "$(date +%FT%T)" "$*" >>"$logs/worker_$worker.log"
        run_worker "$worker" "$line" &
        jobs+=($!)
    done
    while [ "$(ended)" -lt "${#workers[@]}" ]; do
        if [ "$asked" -gt "$handled" ]; then
            handled=$asked
            if [ "$asked" -eq 1 ]; then
                say "forwarding SIG$asked_by to all workers, which may take $grace_s s to end; another signal kills them"
                stop_all "$asked_by"
            else
                say "killing all workers"
                stop_all KILL
            fi
        elif [ "$kill_at" -eq 0 ] && [ -n "$(first_bad)" ]; then
            [ "$stop_at" -gt 0 ] || stop_at=$((SECONDS + settle_s))
            if [ "$SECONDS" -ge "$stop_at" ]; then
                by_itself=$(cat "$scratch/ended")
                say "stopping the others, since $(tell <<<"$by_itself")"
                stop_all TERM
            fi
        elif [ "$kill_at" -gt 0 ] && [ "$SECONDS" -ge "$kill_at" ]; then
            note_lost_jobs kill
        fi
        note_lost_jobs
        pause "$POLL_S"
    done
    # This is also done if all workers ended by themselves: after a lost connection, the program may still run.
    [ -z "$(first_bad)" ] || [ "$kill_at" -gt 0 ] || stop_all TERM
    [ -n "$by_itself" ] || by_itself=$(cat "$scratch/ended")
    wait_for_stops
}

wait_for_stops() {
    local job
    for job in ${stop_jobs[@]+"${stop_jobs[@]}"}; do
        while kill -s 0 "$job" 2>/dev/null && [ "$SECONDS" -lt $((kill_at + 30)) ]; do pause "$POLL_S"; done
        kill -s KILL -- "-$job" 2>/dev/null || true
    done
}

# Turns lines "worker code" into "worker 0 ended with 134 (lost another host), ..." without successful workers.
tell() {
    awk '
        BEGIN {
            why[2] = "unusable input"; why[70] = "watchdog"; why[75] = "stopped, with a checkpoint"; why[76] = "connection lost"
            why[124] = "--limit reached"; why[130] = "interrupted"; why[134] = "lost another host"; why[137] = "killed"
            why[143] = "ended by SIGTERM"; why[255] = "connection lost"
        }
        $2 != 0 { text = text (text ? ", " : "") "worker " $1 " ended with " $2 ($2 in why ? " (" why[$2] ")" : "") }
        END { print text ? text : "all workers ended well" }'
}

# Returns whether another start may succeed. The first worker that failed decides: after a failure, the others
# end with 134, because they lost a host.
passes() {
    awk '
        $2 == 2 { never = 1 }
        $2 != 0 && !first { first = $2 }
        END { exit never || first !~ /^(70|75|76|134|137|143|255)$/ }' <<<"$by_itself"
}

# Sets `resumed` to the command that continues from the newest checkpoint.
resume_command() {
    resumed=("${command[@]}")
    [ "${command[0]##*/}" = grpo ] && [ "${command[1]-}" = train ] || return 0
    [[ " ${command[*]} " == *" --resume"* ]] || resumed+=(--resume auto)
}

check_tpu
check_launch
make_scratch
find_workers
asked=0 asked_by='' status=0
tag=$(date +%Y%m%d-%H%M%S)-$$

if [ "$stop_only" = true ]; then
    tag='' stop_signal=TERM
    [ "$dry_run" = false ] || { echo "would stop any launch on worker ${workers[*]} of $tpu_name"; exit; }
    each_worker stop_worker
    exit
fi
if [ "$dry_run" = true ]; then
    gcloud() { printf 'gcloud' && printf ' %q' "$@" && echo; }
    for worker in "${workers[@]}"; do on_worker "$worker" "$(start_command "$tag" "${command[@]}")"; done
    exit
fi

logs=${logs:-launches/${tpu_name#*@}-$(date +%Y%m%d-%H%M%S)}
mkdir -p -- "$logs" || fail "cannot make the folder $logs."
trap 'asked=$((asked + 1)) asked_by=INT' INT
trap 'asked=$((asked + 1)) asked_by=TERM' TERM HUP
set -m # every job has its own process group: Ctrl-C only reaches this script, and a job ends with all its children

say "worker ${workers[*]} of $tpu_name: ${command[*]}; logs in $logs"
run_once "${command[@]}"
resume_command
for ((attempt = 1; ; attempt++)); do
    status=$(first_bad)
    status=${status:-0}
    say "$(tell <"$scratch/ended")"
    [ "$status" -ne 0 ] || break
    [ "$asked" -eq 0 ] || break
    [ "$attempt" -le "$restarts" ] || break
    passes || break
    say "start $attempt of $restarts in $wait_s s: ${resumed[*]}"
    pause "$wait_s"
    [ "$asked" -eq 0 ] || break
    (find_workers) || break
    tag=${tag%.*}.$attempt
    run_once "${resumed[@]}"
done
[ "$status" -eq 0 ] || say "see $logs"
exit "$status"
