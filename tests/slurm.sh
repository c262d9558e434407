#!/bin/bash
# A real SLURM of two nodes on this machine, for the tests: a controller and two daemons that call themselves n0 and n1.
#
#     tests/slurm.sh start FOLDER    configuration, state and logs go there; `export SLURM_CONF=FOLDER/slurm.conf` uses it
#     tests/slurm.sh stop FOLDER
#
# Needs root, and Debian's slurm-wlm and munge. Ports are chosen by the folder, so that two of them do not meet.
set -euo pipefail

action=${1:?start or stop} folder=$(realpath -m "${2:?a folder}")

stop() {
    for pidfile in "$folder"/*.pid; do
        [ -e "$pidfile" ] && kill "$(cat "$pidfile")" 2>/dev/null && rm -f "$pidfile" || true
    done
}

if [ "$action" = stop ]; then
    stop
    exit
fi

mkdir -p "$folder/state" "$folder/munge"
host=$(hostname -s) cores=$(nproc)
first=$((20000 + $(printf %s "$folder" | cksum | cut -d' ' -f1) % 9000))

# A munge of its own, with a key of its own.
head -c 1024 /dev/urandom >"$folder/munge/munge.key"
chown -R munge: "$folder/munge" && chmod 700 "$folder/munge" && chmod 400 "$folder/munge/munge.key"
mkdir -p "$folder/socket" && chown munge: "$folder/socket" && chmod 755 "$folder/socket"
runuser -u munge -- munged --force --key-file="$folder/munge/munge.key" --socket="$folder/socket/munge.sock" \
    --pid-file="$folder/munge/munged.pid" --log-file="$folder/munge/munged.log" --seed-file="$folder/munge/munged.seed"
cp "$folder/munge/munged.pid" "$folder/munged.pid"

cat >"$folder/slurm.conf" <<CONF
ClusterName=gptlab
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=$first
AuthType=auth/munge
AuthInfo=socket=$folder/socket/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=300
InactiveLimit=0
KillWait=5
MinJobAge=600
JobRequeue=1
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
NodeName=n[0-1] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((first + 1))-$((first + 2))] CPUs=4 RealMemory=4000
PartitionName=main Nodes=n[0-1] Default=YES State=UP OverSubscribe=FORCE:4 MaxTime=INFINITE
CONF

export SLURM_CONF=$folder/slurm.conf
slurmctld
for node in n0 n1; do
    mkdir -p "$folder/spool-$node"
    slurmd -N "$node"
done
for _ in $(seq 300); do
    [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = 2 ] && exit
    sleep 0.2
done
echo "the nodes did not come up: see $folder/*.log" >&2
stop
exit 1
