#!/usr/bin/env bash
# All GPUs of this machine. After a failure all processes start again, up to RESTARTS times, from the newest checkpoint.
#
#     recipes/launch/one_node.sh recipes/llm.py config=a100_8x data.path=my_texts
#
# PROCESSES: one for each GPU unless given (a number, gpu or cpu).  RESTARTS: 3.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # what torchrun takes anyway, without its warning; raise it for CPU work

settings=(trainer.devices=-1 trainer.num_nodes=-1 resume=auto)
if [[ "${1:-}" == *.py ]]; then  # what is wrong with a recipe's settings is said once, not at each restart
  python "$@" "${settings[@]}" dry_run=true > /dev/null
fi
exec torchrun --standalone --nproc-per-node="${PROCESSES:-gpu}" --max-restarts="${RESTARTS:-3}" \
  "$@" "${settings[@]}"
