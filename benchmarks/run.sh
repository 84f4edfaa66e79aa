#!/usr/bin/env bash
# Training with DeadPool beside the same training without it: step time, CPU, memory, and one SIGKILL per run.
#
#   benchmarks/run.sh         own: DDP and FSDP2, computing, and with the compute on a device; idle cost
#   benchmarks/run.sh peers   the peers on the same workload, after benchmarks/peers/setup.sh
#
# Environment: PYTHON, PEERS_PYTHON, OUT (folder), ROUNDS, KILL (step of the fault), END (steps), CONFIGURATIONS.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root/benchmarks/peers"
python=${PYTHON:-$root/.venv/bin/python}
peers_python=${PEERS_PYTHON:-${PEERS_HOME:-$HOME/.cache/deadpool-peers}/venv/bin/python}
out=${OUT:-$(mktemp -d)}
kill=${KILL:-43}
end=${END:-45}

case ${1:-own} in
  own)
    rounds=${ROUNDS:-1}
    computing="plain deadpool plain plain_fsdp2 deadpool_fsdp2 plain_fsdp2"
    waiting="plain_sleep deadpool_sleep plain_sleep plain_fsdp2_sleep deadpool_fsdp2_sleep plain_fsdp2_sleep"
    configurations=${CONFIGURATIONS:-$computing $waiting deadpool_idle}
    ;;
  peers)
    rounds=${ROUNDS:-3}
    configurations=${CONFIGURATIONS:-plain dcp_sync1 dcp_async1 dcp_async10 plain torchft_spare deadpool torchft_tuned
      plain nvrx_localasync1_tuned lmres1 ftl_sync1 plain}
    ;;
  *)
    sed -n '4,7s/^# *//p' "$root/benchmarks/run.sh"
    exit 2
    ;;
esac

for round in $(seq 1 "$rounds"); do
  number=10 # so that names sort in the order of the runs
  for configuration in $configurations; do
    number=$((number + 1))
    fault=$kill steps=$end interpreter=$python
    case $configuration in
      plain*) fault=0 ;;
      *_idle) fault=0 steps=3 ;;
      torchft_tuned) steps=$((kill + 25)) ;; # its lost replica comes back some steps later
    esac
    case $configuration in
      torchft* | nvrx* | lmres* | ftl*) interpreter=$peers_python ;;
    esac
    "$interpreter" run.py "$configuration" "$out/round$round/$number-$configuration" \
      --steps "$steps" --kill "$fault" --timeout 170 || echo "see $out/round$round/$number-$configuration" >&2
  done
done
"$python" analyse.py "$out" | tee "$out/report.md"
echo "runs and report: $out" >&2
