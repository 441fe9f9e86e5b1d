#!/usr/bin/env bash
# Starts one engine as several processes on this machine: for tests, and for hosts whose parts (NUMA) serve better apart.
#
#   scripts/launch_local.sh PROCESSES DEVICES [-b COMMAND] [flags of lmjax serve]
#
# PROCESSES processes with DEVICES devices each (GPUs: the first DEVICES to the first process, and so on; on a CPU they
# are the same cores). Rank 0 has the HTTP server. All devices are tensor-parallel unless flags (not a config file) say
# otherwise: --pipeline-parallel-size P alone leaves stages of PROCESSES x DEVICES / P devices.
# -b: a command in front of each, where % is the rank: -b 'numactl --cpunodebind=% --membind=%'.
# LMJAX: the command (lmjax). MASTER_PORT: where the ranks meet (29500).
# Ctrl-C and SIGTERM go to all ranks; ends with the first status that is not 0.
set -u -m # -m: each rank in a process group of its own, so that Ctrl-C reaches it once, from here

count='^[1-9][0-9]*$'
if (($# < 2)) || ! [[ $1 =~ $count && $2 =~ $count ]]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
processes=$1 devices=$2
shift 2
before=
if [[ ${1-} == -b ]]; then
  before=$2
  shift 2
fi

# the sizes among the flags: the last one wins, as in lmjax serve
tensor= pipeline=1 name=
for flag in "$@"; do
  value=${flag#*=}
  [[ $flag == --*=* ]] && name=${flag%%=*}
  case $name in
    --tensor-parallel-size) tensor=$value ;;
    --pipeline-parallel-size) pipeline=$value ;;
  esac
  name=$flag
done
total=$((processes * devices))
if [[ $pipeline =~ $count ]]; then
  tensor=${tensor:-$((total / pipeline))}
  if [[ $tensor =~ $count || $tensor == 0 ]] && ((tensor * pipeline != total)); then
    echo "launch_local: error: --tensor-parallel-size x --pipeline-parallel-size must be PROCESSES x DEVICES" \
      "($processes x $devices = $total), got $tensor x $pipeline" >&2
    exit 2
  fi
fi # what is no size is refused by lmjax serve

IFS=, read -r -a cards <<<"${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((total - 1)))}"
if ((${#cards[@]} && ${#cards[@]} < total)); then # none: there shall be none
  echo "launch_local: error: $processes x $devices devices, CUDA_VISIBLE_DEVICES names ${#cards[@]}" >&2
  exit 2
fi

pids=()
for ((rank = 0; rank < processes; rank++)); do
  mine=$(IFS=,; echo "${cards[*]:rank * devices:devices}")
  # shellcheck disable=SC2086  # commands of several words
  CUDA_VISIBLE_DEVICES=$mine ${before//%/$rank} ${LMJAX:-lmjax} serve --tensor-parallel-size "${tensor:-1}" "$@" \
    --nnodes "$processes" --node-rank "$rank" --master-addr 127.0.0.1 --master-port "${MASTER_PORT:-29500}" </dev/null &
  pids+=($!)
done

running() { kill -0 "$1" 2>/dev/null; }
tell() { for pid in "${pids[@]}"; do running "$pid" && kill -"$1" "$pid"; done; }
trap 'tell TERM' INT TERM

status=0 deadline=
while ((${#pids[@]})); do
  sleep 0.2 &
  wait $! 2>/dev/null
  left=()
  for pid in "${pids[@]}"; do
    if running "$pid"; then
      left+=("$pid")
      continue
    fi
    wait "$pid"
    code=$?
    ((status)) || status=$code
  done
  pids=(${left[@]+"${left[@]}"})
  # the others find out by themselves; who has not after 40 s is stuck
  ((status)) && [[ -z $deadline ]] && deadline=$((SECONDS + 40))
  [[ -n $deadline ]] && ((SECONDS > deadline)) && tell KILL
done
exit "$status"
