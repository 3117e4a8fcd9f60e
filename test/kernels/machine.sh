#!/usr/bin/env bash
#
# machine.sh KERNEL FOLDER LOG
#
# Boots the kernel in folder KERNEL with what is in FOLDER: an init, and files
# around it. Busybox and the modules come along; etc/modules names those that init
# loads. Returns when the machine has powered off, or panicked, and fails if it has
# not after SLUICE_TEST_SECONDS (default 2400). The kernel's messages are in
# LOG.console, and what init writes to the device $tests is in LOG.tests.

set -euo pipefail

kernel=$1 folder=$2 log=$3
linux=$(basename "$kernel"/lib/modules/*)

# Loaded on demand, as on a node. Dependencies come along.
modules=(veth bridge br_netfilter dummy tun vxlan 8021q sctp inet_diag tcp_diag udp_diag sch_ingress cls_bpf
	nf_conntrack nf_conntrack_netlink nf_tables nft_ct nft_nat nft_chain_nat nft_masq nft_fib_inet nft_objref nft_counter)
# Loaded at the start, as many as on a node with kube-proxy and a CNI: all of netfilter.
mapfile -t loaded < <(find "$kernel/lib/modules/$linux/kernel/net/netfilter" -maxdepth 1 -name '*.ko*' -printf '%f\n' | cut -d. -f1 | sort)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

root=$work/root
mkdir -p "$root"/{bin,sbin,dev,etc,proc,run,sys,tmp,"lib/modules/$linux"}
cp -r "$folder/." "$root"
printf '%s\n' "${loaded[@]}" >"$root/etc/modules"
# The firewall of the lab's nodes, with what it and tests are linked to.
if [[ -d $kernel/userland ]]; then
	cp "$kernel/userland/usr/bin/busybox" "$root/bin/busybox"
	cp "$kernel/userland/usr/sbin/nft" "$root/sbin/nft"
	cp -rL "$kernel"/userland/usr/lib/{*-linux-gnu,ld-linux-*} "$root/lib"
else
	cp "$(type -P busybox)" "$root/bin/busybox"
	{ type -P nft; ldd "$(type -P nft)" | grep -o '/[^ ]*'; } | xargs cp -L --parents -t "$root"
fi

for module in "${modules[@]}" "${loaded[@]}"; do
	# Some kernels have it built in, or as a part of another.
	modprobe -d "$kernel" -S "$linux" --show-depends "$module" 2>/dev/null || true
done | awk '$1 == "insmod" { print $2 }' | sort -u | xargs cp -t "$root/lib/modules/$linux"
find "$root/lib/modules" -name '*.xz' -exec xz -d {} +
cp "$kernel/lib/modules/$linux"/modules.{builtin,builtin.modinfo,order} "$root/lib/modules/$linux"
depmod -b "$root" "$linux"

(cd "$root" && find . -print0 | cpio -0 -o -H newc --quiet | gzip -1) >"$work/initramfs"

# The kernel hands $tests on to init.
if [[ $kernel == *-arm64 ]]; then
	machine=(qemu-system-aarch64 -machine virt -cpu "max,pauth-impdef=on"
		-serial "file:$log.console" -chardev "file,id=tests,path=$log.tests" -device "pci-serial,chardev=tests"
		-append "console=ttyAMA0 panic=-1 tests=/dev/ttyS0")
else
	# Its timer may miss interrupts at the start if the machine that it runs on is busy.
	machine=(qemu-system-x86_64 -cpu max
		-serial "file:$log.console" -serial "file:$log.tests"
		-append "console=ttyS0 panic=-1 no_timer_check tests=/dev/ttyS1")
fi
machine+=(-accel "${SLUICE_TEST_ACCEL:-tcg}" -smp 2 -m 2G -nodefaults -display none -no-reboot
	-kernel "$kernel/vmlinuz" -initrd "$work/initramfs")
# The machine ends with this script, and if it hangs before init runs, as the emulation of a busy machine may.
setpriv --pdeathsig TERM timeout --kill-after=10 "${SLUICE_TEST_SECONDS:-2400}" "${machine[@]}" </dev/null &
running=$!
for ((second = 0; second < 300; second++)); do
	if [[ -s $log.tests ]] || ! kill -0 "$running" 2>/dev/null; then
		break
	fi
	sleep 1
done
[[ -s $log.tests ]] || kill "$running" 2>/dev/null || true
wait "$running"
