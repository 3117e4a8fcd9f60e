#!/usr/bin/env bash
#
# setup.sh [demo|bench|test|cluster|lint|generate|image]...
#
# Makes this machine ready for these verbs of the Makefile, by default for all
# of them: installs what is missing (on Debian and Ubuntu), mounts bpffs and
# cgroup v2, and builds the Kubernetes that the tests run against. What is there
# already stays as it is; then no network is needed and next to no time.

set -euo pipefail

die() {
	echo "test/setup.sh: $*" >&2
	exit 1
}

# needs_of lists files that a verb needs, each with the package that has it.
needs_of() {
	case $1 in
	demo) ;;
	image)
		echo /usr/bin/buildah buildah
		;;
	bench | test)
		# The image that the tests of the manifests run.
		echo /usr/bin/buildah buildah
		# What kube-proxy programs, and the firewall of the lab's nodes.
		echo /usr/sbin/nft nftables
		echo /usr/sbin/iptables iptables
		# Loads that are as large as can be.
		echo /usr/bin/iperf3 iperf3
		# The terminal of `sluice top`.
		[[ $1 == bench ]] || echo /usr/bin/tmux tmux
		# Alerts and dashboards. The service that Debian starts is not used.
		[[ $1 == bench ]] || echo /usr/bin/promtool prometheus
		# A browser. Ubuntu has none as a package.
		[[ $1 == bench ]] || ! grep -q '^ID=debian' /etc/os-release || echo /usr/bin/chromium-headless-shell chromium-headless-shell
		# Programs of test/senders.
		[[ $1 == bench ]] || cat <<-EOF
			/usr/bin/python3 python3
			/usr/bin/nc.openbsd netcat-openbsd
			/usr/bin/node nodejs
			/usr/bin/javac default-jdk-headless
		EOF
		;;
	cluster)
		echo /usr/bin/buildah buildah
		# What containerd runs pods with.
		echo /usr/sbin/runc runc
		echo /usr/lib/cni/bridge containernetworking-plugins
		;;
	lint)
		echo /usr/bin/clang-format-19 clang-format-19
		echo /usr/bin/shellcheck shellcheck
		;;
	generate)
		# One version of the compiler for all developers: its output is committed.
		echo /usr/bin/clang-19 clang-19
		echo /usr/bin/llvm-strip-19 llvm-19
		echo /usr/include/bpf/bpf_helpers.h libbpf-dev
		echo /usr/include/linux/bpf.h linux-libc-dev
		;;
	setup)
		# For people who look at what a test left behind.
		echo /sbin/ip iproute2
		echo /usr/sbin/bpftool bpftool
		;;
	*) die "no verb is called $1" ;;
	esac
}

install_packages() {
	local apt=(apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300) pause

	[[ -x /usr/bin/apt-get ]] || die "please install what Debian calls: $*"
	[[ $EUID -eq 0 ]] || die "must be root to install: $*"
	echo "test/setup.sh: installing $*" >&2
	export DEBIAN_FRONTEND=noninteractive
	# The lock of the package lists is not waited for, and mirrors change under our feet.
	for pause in 5 15 45 0; do
		if "${apt[@]}" update >&2 && "${apt[@]}" install -y --no-install-recommends "$@" >&2; then
			return
		fi
		sleep "$pause"
	done
	die "apt-get could not install: $* (LLVM 19 for every release: https://apt.llvm.org)"
}

install_missing() {
	local packages=() needs file package

	needs=$(for verb; do needs_of "$verb"; done)
	while read -r file package; do
		[[ -z $file || -e $file ]] || packages+=("$package")
	done <<<"$needs"
	[[ ${#packages[@]} -eq 0 ]] || install_packages "${packages[@]}"
}

# prepare_kernel does what verbs that load programs need.
prepare_kernel() {
	local release root=/sys/fs/cgroup

	[[ $EUID -eq 0 ]] || die "must be root to load BPF programs"
	release=$(uname -r)
	printf '%s\n' 5.10 "$release" | sort -CV || die "Linux 5.10 or later is needed, this is $release"
	[[ -e /sys/kernel/btf/vmlinux ]] || die "this kernel does not describe itself (CONFIG_DEBUG_INFO_BTF)"

	if [[ $(stat -fc %T /sys/fs/bpf) != bpf_fs ]]; then
		mount -t bpf bpf /sys/fs/bpf || die "bpffs cannot be mounted: a container has to be privileged"
	fi
	if ! grep -Eq '^\S+ \S+ \S+ / .* - cgroup2 ' /proc/self/mountinfo; then
		# Beside cgroup v1, this is where systemd has it.
		[[ $(stat -fc %T $root) == sysfs ]] || root+=/unified
		mkdir -p $root
		mount -t cgroup2 cgroup2 $root || die "cgroup v2 cannot be mounted at $root"
	fi
}

[[ $(uname -s) == Linux ]] || die "Linux is needed, this is $(uname -s)"
type -P go >/dev/null || die "go is not in PATH: see https://go.dev/dl (and mind that sudo changes PATH)"
[[ $# -gt 0 ]] || set -- setup demo bench test cluster lint generate image

install_missing "$@"
case " $* " in *" demo "* | *" bench "* | *" test "* | *" cluster "*) prepare_kernel ;; esac
case " $* " in *" bench "* | *" test "*) "$(dirname "$0")/cluster/build.sh" >/dev/null ;; esac
