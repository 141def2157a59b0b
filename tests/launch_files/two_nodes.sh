#!/usr/bin/env bash
# unshare -rn two_nodes.sh FOLDER COMMAND [ARGUMENT ...]: run a command on two "nodes", network namespaces with one link between
# them, 10.77.0.1 and 10.77.0.2. FOLDER gets the output of each in 1.txt and 2.txt, the exit codes in 1.code and 2.code, and the
# process ids in 1.pid and 2.pid.
set -euo pipefail
folder=$1
shift

unshare -n sleep infinity &
second=$!
trap 'kill $second' EXIT
while [ "$(readlink /proc/$second/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add node1 type veth peer name node2 netns $second
for number in 1 2; do
  enter=()
  [ $number = 2 ] && enter=(nsenter --target "$second" --net)
  "${enter[@]}" ip link set lo up
  "${enter[@]}" ip address add "10.77.0.$number/24" dev node$number
  "${enter[@]}" ip link set node$number up
  {
    "${enter[@]}" "$@" >"$folder/$number.txt" 2>&1 &
    echo $! >"$folder/$number.pid"
    code=0
    wait $! || code=$?
    echo $code >"$folder/$number.code"
  } &
  nodes+=($!)
done
wait "${nodes[@]}"
