#!/usr/bin/env bash
#
# machine.sh KERNEL FOLDER LOG
#
# Boots the kernel in folder KERNEL with what is in FOLDER: an init, and files
# around it. Busybox and the modules come along. Returns when the machine has
# powered off, or panicked, and fails if it has not after SLUICE_TEST_SECONDS
# (default 2400). The kernel's messages are in LOG.console, and what init writes
# to /dev/ttyS1 is in LOG.tests.

set -euo pipefail

kernel=$1 folder=$2 log=$3
linux=$(basename "$kernel"/lib/modules/*)

# Loaded on demand, as on a node. Dependencies come along.
modules=(veth bridge br_netfilter dummy tun vxlan sctp inet_diag tcp_diag udp_diag sch_ingress cls_bpf
	nf_conntrack nf_conntrack_netlink nf_tables nft_ct nft_nat nft_chain_nat nft_masq nft_fib_inet nft_objref nft_counter)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

root=$work/root
mkdir -p "$root"/{bin,sbin,dev,etc,proc,run,sys,tmp,"lib/modules/$linux"}
cp "$(type -P busybox)" "$root/bin/busybox"
cp -r "$folder/." "$root"
# The firewall of the lab's nodes, with what it is linked to.
{ type -P nft; ldd "$(type -P nft)" | grep -o '/[^ ]*'; } | xargs cp -L --parents -t "$root"

for module in "${modules[@]}"; do
	# Some kernels have it built in, or as a part of another.
	modprobe -d "$kernel" -S "$linux" --show-depends "$module" 2>/dev/null || true
done | awk '$1 == "insmod" { print $2 }' | sort -u | xargs cp -t "$root/lib/modules/$linux"
find "$root/lib/modules" -name '*.xz' -exec xz -d {} +
cp "$kernel/lib/modules/$linux"/modules.{builtin,builtin.modinfo,order} "$root/lib/modules/$linux"
depmod -b "$root" "$linux"

(cd "$root" && find . -print0 | cpio -0 -o -H newc --quiet | gzip -1) >"$work/initramfs"

machine=(qemu-system-x86_64 -accel "${SLUICE_TEST_ACCEL:-tcg}" -cpu max -smp 2 -m 2G
	-nodefaults -display none -no-reboot
	-serial "file:$log.console" -serial "file:$log.tests"
	-kernel "$kernel/vmlinuz" -initrd "$work/initramfs" -append "console=ttyS0 panic=-1")
# The machine ends with this script.
setpriv --pdeathsig TERM timeout --kill-after=10 "${SLUICE_TEST_SECONDS:-2400}" "${machine[@]}" </dev/null
