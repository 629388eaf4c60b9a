#!/usr/bin/env bash
# Checks and measures the engine on one GPU, and on two if there are: see benchmarks/README.md.
set -u
usage="usage: gpu.sh FOLDER [--wheels DIR] [--peers DIR] [--only PHASE]

Run the phases 0 to 6 on a GPU, each within a time limit, and print a table of their results. Each phase writes
FOLDER/phase-N.json; a phase that has written it is not run again. Needs Python with torch for CUDA and Triton.

  --wheels DIR   install the engine's other packages from this folder into FOLDER/site, without network
  --peers DIR    compare with the vLLM in DIR/vllm, a virtual environment (phase 4)
  --only PHASE   run this phase only: 0, 1, 2, 3, 4, 5 or 6 (needs two GPUs)
  --device KIND  cuda, the default, or cpu, which runs what needs no GPU in small sizes
  PYTHON         variable: the interpreter. Default: python3"
here=$(cd "$(dirname "$0")" && pwd)
folder="" wheels="" peers="" only="" device=cuda limits=(20 120 60 200 140 40 300)
fail() { echo "gpu.sh: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) echo "$usage"; exit 0 ;;
    --wheels) [ $# -ge 2 ] || fail "--wheels needs a folder"; wheels=$2; shift 2 ;;
    --peers) [ $# -ge 2 ] || fail "--peers needs a folder"; peers=$2; shift 2 ;;
    --only) [ $# -ge 2 ] || fail "--only needs a phase"; only=$2; shift 2 ;;
    --device) [ $# -ge 2 ] || fail "--device needs cuda or cpu"; device=$2; shift 2 ;;
    -*) fail "unknown option $1: see --help" ;;
    *) [ -z "$folder" ] || fail "a second folder: $1"; folder=$1; shift ;;
  esac
done
[ -n "$folder" ] || fail "FOLDER is missing: see --help"
case "$only" in "" | [0-6]) ;; *) fail "--only $only: use 0, 1, 2, 3, 4, 5 or 6" ;; esac
case "$device" in cuda | cpu) ;; *) fail "--device $device: use cuda or cpu" ;; esac
[ -z "$wheels" ] || [ -d "$wheels" ] || fail "--wheels $wheels: no such folder"
[ -z "$peers" ] || [ -x "$peers/vllm/bin/python" ] || fail "--peers $peers: it has no vllm/bin/python"
[ -z "$peers" ] || export VLLM_PYTHON="$peers/vllm/bin/python"
mkdir -p "$folder" || exit 1
export PYTHONPATH="$folder/site:$here/../engine/src${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
if [ -n "$wheels" ] && [ ! -d "$folder/site" ]; then
  "$python" -m pip install -q --no-index --no-deps --target "$folder/site" "$wheels"/*.whl || exit 1
fi
status=0
for phase in ${only:-0 1 2 3 ${peers:+4} 5 6}; do
  [ -f "$folder/phase-$phase.json" ] && { echo "phase $phase: done before"; continue; }
  timeout --kill-after=5 "${limits[$phase]}" "$python" "$here/gpu_phases.py" "$phase" "$folder" --device "$device"
  code=$?
  [ $code -eq 0 ] || { echo "phase $phase: failed with code $code (124: its limit of ${limits[$phase]} s)" >&2; status=1; }
done
"$python" "$here/gpu_phases.py" table "$folder" || status=1
exit $status
