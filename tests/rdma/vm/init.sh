#!/bb/busybox sh
# First and only process of the test machine: modules, file systems, network, RDMA devices, one command.
# The exit code leaves through the debug-exit device: qemu ends with 2 * code + 1, so that a panic (0) or a
# killed qemu is never taken for a success.
b=/bb/busybox
$b mount -t devtmpfs dev /dev
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mkdir -p /dev/pts /dev/shm
$b mount -t devpts devpts /dev/pts
for folder in /dev/shm /tmp; do $b mount -t tmpfs -o mode=1777 tmpfs $folder; done
$b mount -t tmpfs tmpfs /run

finish() {
  code=$1
  [ "$code" -gt 120 ] && code=120
  printf "\\$(printf %03o "$code")" | $b dd of=/dev/port bs=1 seek=1281 count=1 2>/dev/null
  $b reboot -f
}

for module in $($b cat /modules/order); do
  $b insmod "/modules/$module" 2>/dev/null || echo "vm: module $module does not load"
done
net=none rails=1 loss=0
for word in $($b cat /proc/cmdline); do
  case $word in
    vm.net=*) net=${word#*=} ;;
    vm.rails=*) rails=${word#*=} ;;
    vm.loss=*) loss=${word#*=} ;;
  esac
done

shared=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o $shared,cache=loose,ro usr /host/usr || finish 119
$b mount -t 9p -o $shared,cache=loose,ro verbs /verbs || finish 119
$b mount -t overlay -o ro,lowerdir=/verbs/usr:/host/usr overlay /usr || finish 119
$b mount -t 9p -o $shared share /share || finish 119
number=0
while read -r path; do
  $b mkdir -p "$path"
  $b mount -t 9p -o $shared,cache=loose,ro "ro$number" "$path" || finish 119
  number=$((number + 1))
done </share/.vm/folders

export PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C.UTF-8
ulimit -l unlimited
ip() { /usr/bin/ip "$@"; } # busybox sh would take its own, which knows no veth
# One 8 MiB RDMA message is more packets than the default backlog of the receive queue holds.
echo 100000 >/proc/sys/net/core/netdev_max_backlog
ip link set lo up

dummy() {
  ip link add d0 type dummy
  ip addr add 10.9.0.1/24 dev d0
  ip link set d0 mtu 4200 up
  rdma link add rxe0 type rxe netdev d0
}

# Two ends of a cable in one kernel. The table of local addresses moves behind our rules; otherwise packets
# to the other end would take the loopback interface, where there is no RDMA device.
wire() {
  echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
  rail=0
  while [ $rail -lt "$rails" ]; do
    left=va$rail right=vb$rail
    ip link add $left type veth peer name $right
    for end in $left $right; do
      echo 1 >/proc/sys/net/ipv4/conf/$end/accept_local
      echo 0 >/proc/sys/net/ipv4/conf/$end/rp_filter
    done
    ip addr add 10.9.$rail.1/24 dev $left
    ip addr add 10.9.$rail.2/24 dev $right
    ip link set $left mtu 4200 up
    ip link set $right mtu 4200 up
    ip rule add pref 100 iif $left lookup local
    ip rule add pref 100 iif $right lookup local
    ip route add 10.9.$rail.2 dev $left src 10.9.$rail.1 table 200
    ip route add 10.9.$rail.1 dev $right src 10.9.$rail.2 table 200
    ip rule add pref 110 to 10.9.$rail.0/24 lookup 200
    if [ "$loss" != 0 ]; then
      for end in $left $right; do /usr/sbin/tc qdisc add dev $end root netem limit 100000 loss "$loss%"; done
    fi
    rail=$((rail + 1))
  done
  ip rule add pref 120 lookup local
  ip rule del pref 0
  rail=0
  while [ $rail -lt "$rails" ]; do
    rdma link add rxa$rail type rxe netdev va$rail
    rdma link add rxb$rail type rxe netdev vb$rail
    rail=$((rail + 1))
  done
}

case $net in
  dummy) dummy ;;
  wire) wire ;;
esac
cd /share || finish 119
read -r up _ </proc/uptime
echo "vm: ready after ${up} s, net $net"
/usr/bin/bash /share/.vm/command
code=$?
echo "vm: exit code $code"
finish $code
