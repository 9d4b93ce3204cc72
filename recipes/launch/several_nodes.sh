#!/usr/bin/env bash
# The same command on each of NODES machines, in any order; they meet at HEAD, which is one of them. Their checkpoints
# and data lie on a file system that all of them see.
#
#     HEAD=node-0:29400 NODES=2 recipes/launch/several_nodes.sh recipes/llm.py config=a100_multinode
#
# PROCESSES, RESTARTS: see one_node.sh; as many processes on each node.  RUN: a name, where several runs share a HEAD.
# ADDRESS: of this node, where the others do not find it by its host name; HEAD then begins with that of one node.
# INTERFACE: network device for gradients (ip -br addr), where there are several and the wrong one is taken.
set -euo pipefail
: "${HEAD:?say where the nodes meet: HEAD=host:port}" "${NODES:?say how many nodes there are: NODES=2}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A node that takes a lost one's place needs a store of its own generation, which torchrun otherwise shares over restarts.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
if [[ -n "${INTERFACE:-}" ]]; then
  export NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
fi

named=()
if [[ -n "${ADDRESS:-}" ]]; then  # torchrun itself would look whether HEAD is a name of this machine
  named=(--local-addr="$ADDRESS" --rdzv-conf=is_host="$([[ "${HEAD%:*}" == "$ADDRESS" ]] && echo 1 || echo 0)")
fi

settings=(trainer.devices=-1 trainer.num_nodes=-1 resume=auto)
if [[ "${1:-}" == *.py ]]; then  # what is wrong with a recipe's settings is said once, not at each restart
  python "$@" "${settings[@]}" dry_run=true > /dev/null
fi
exec torchrun --nnodes="$NODES" --nproc-per-node="${PROCESSES:-gpu}" --max-restarts="${RESTARTS:-3}" \
  --rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="${RUN:-ddp_plugin}" \
  ${named[@]+"${named[@]}"} "$@" "${settings[@]}"
