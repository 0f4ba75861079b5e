#!/usr/bin/env bash
# Runs the same command on every worker of a Cloud TPU VM, and ends it on all when it ends badly on one.
#
#   bash scripts/launch_on_tpu_vm.sh --name TPU --zone ZONE [options] -- grpo train --config PRESET
#   bash scripts/launch_on_tpu_vm.sh --name TPU --zone ZONE --stop
#
#   --project ID    Google Cloud project (default: gcloud's own)
#   --folder NAME   folder below the home directory there, with the .venv of setup_tpu_vm.sh (default: grpo)
#   --logs DIR      folder for worker_0.log, worker_1.log, ... (default: launches/TPU-TIME in the working directory)
#   --show          also prints every line here, behind its worker's number
#   --restarts N    starts it again, N times at most, where the worker that ended badly first did so by what passes:
#                   70 (watchdog), 75 (preempted), 134 (lost another host), 137 (killed), 143 (preempted while it was
#                   starting) and 76 or 255 (connection lost), unless a worker ended with 2 (unusable input).
#                   `grpo train` goes on with --resume auto. (default: 0)
#   --wait S        seconds before it is started again (default: 10)
#   --settle S      seconds that the others have to end by themselves when one has ended badly (default: 5)
#   --grace S       seconds from a TERM to the KILL (default: 120); a step and its checkpoint must fit
#   --limit S       seconds after which every worker is stopped as with TERM (default: 0, never)
#   --stop          stops what an earlier launch has left running, and does nothing else
#   --dry-run       prints the gcloud commands instead of running them
#
# Ctrl-C and SIGTERM are handed on to all workers, which save and end; the second time they are killed. A terminal that
# is closed counts as SIGTERM.
# Exit code: of the worker that ended badly first (124 = --limit was reached), 0 when all have ended well.
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
        *) tpu_option "$1" "${2-}" || refuse "unknown argument $(printf '%q' "$1"); the command comes behind --, --help lists the options." ;;
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
    [ "${#command[@]}" -gt 0 ] || refuse "nothing to run. The command comes behind --, as in: -- grpo train --config PRESET"
    [ "$restarts" -gt 0 ] || return 0
    for word in "${command[@]}"; do
        case "$previous $word" in
            "--resume never" | *" --resume=never") refuse "--restarts and --resume never exclude each other; leave --resume out." ;;
        esac
        previous=$word
    done
}

# What runs on a worker. The lock file holds process and tag of the newest launch, and is locked while it runs.
# gcloud repeats a command whose connection broke: a tag that was seen before is not started again.
# The shell outlives `timeout`, so that an end by a signal is an exit code (134, 137) and not a broken connection, and
# ends what the program has left behind, which would keep the devices.
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

# Ends what START runs: the signal once, to the program alone; KILL for its whole process group after the grace.
# A launch that has not begun yet finds its tag used. An empty tag means any launch.
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
    echo "left alone: another launch ($seen)"
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

# Interrupted at once by a signal that is trapped, which a sleep in the foreground is not.
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

run_worker() { # WORKER LINE: its exit code goes to $scratch/ended, a line for each worker in the order in which they end
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

first_bad() { # the exit code of the worker that ended badly first; nothing while none has
    awk '$2 != 0 { print $2; exit }' "$scratch/ended"
}

# A job that is gone without a word counts as a lost connection; with `kill`, so do those that are still there.
note_lost_jobs() {
    local index
    for index in "${!jobs[@]}"; do
        [ "${1-}" != kill ] || kill -s KILL -- "-${jobs[index]}" 2>/dev/null || true
        [ "${1-}" != kill ] && kill -s 0 "${jobs[index]}" 2>/dev/null && continue
        grep -q "^${workers[index]} " "$scratch/ended" || echo "${workers[index]} 255" >>"$scratch/ended"
    done
}

# run_once COMMAND...: one attempt, to its end on every worker. `by_itself` holds what ended before anything was stopped.
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
                say "handing SIG$asked_by on to all workers, which may take $grace_s s; once more kills them"
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
    # Also where all have ended by themselves: behind a broken connection the program may be left.
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

# Lines "worker code" in, "worker 0 ended with 134 (lost another host), ..." out; those that ended well are left out.
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

# Whether what ended by itself is worth another start. The first that ended badly decides: where one fails, the others
# end with 134, since they lost it.
passes() {
    awk '
        $2 == 2 { never = 1 }
        $2 != 0 && !first { first = $2 }
        END { exit never || first !~ /^(70|75|76|134|137|143|255)$/ }' <<<"$by_itself"
}

# Fills `resumed`: the command as it goes on from its newest checkpoint.
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
set -m # every job has a process group of its own: a Ctrl-C reaches this script alone, and a job ends with all it started

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
