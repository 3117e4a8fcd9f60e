#!/usr/bin/env bash
#
# run.sh [VERSION...]
#
# Runs the tests of this tree on Debian's kernels (default: 5.10 6.1 6.12 7.3), each
# in a virtual machine, and fails if one fails. 6.12-arm64 is that of another
# architecture. Listens to the environment:
#
#   SLUICE_TEST_PACKAGES  which packages, if not those below
#   SLUICE_TEST_RACE      not empty: with the race detector, on amd64
#   SLUICE_TEST_RUN       which tests, as go test -run
#   SLUICE_TEST_SECONDS   how long a machine may take (default 2400)
#   SLUICE_TEST_ACCEL     what qemu runs on: tcg (default) or kvm
#   SLUICE_TEST_CACHE     where kernels and logs are kept, see kernel.sh
#   SLUICE_DEBIAN_MIRROR  where kernels come from
#   SLUICE_TEST_MATRIX    a file that ends with a table of what passed where: its rows of these
#                         kernels and packages are written anew

set -euo pipefail

if [[ $# -eq 0 ]]; then
	set -- 5.10 6.1 6.12 7.3
fi
read -ra packages <<<"${SLUICE_TEST_PACKAGES:-./maps ./bpf ./pkg/datapath ./pkg/reconcile ./pkg/node ./test/lab ./test/devices}"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."

# install_missing installs the package of each file that is not there.
install_missing() {
	local packages=() file

	while read -r file package; do
		[[ -e $file ]] || packages+=("$package")
	done <<-EOF
		/usr/bin/qemu-system-x86_64 qemu-system-x86
		/usr/bin/qemu-system-aarch64 qemu-system-arm
		/usr/share/doc/busybox-static busybox-static
		/usr/bin/cpio cpio
		/sbin/depmod kmod
		/usr/sbin/nft nftables
		/usr/bin/xz xz-utils
		/usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring
	EOF
	[[ ${#packages[@]} -gt 0 ]] || return 0
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${packages[@]}"
}

# build_tests compiles the tests of packages into a folder as they lie in the
# tree. Packages without tests are left out of plan, which lists what is to be run.
build_tests() {
	local tests=$1 plan=$2 package mode=(env CGO_ENABLED=0 go test)

	if [[ -n ${SLUICE_TEST_RACE:-} ]]; then
		mode=(go test -race -ldflags '-linkmode=external -extldflags=-static')
	fi
	find . -name testdata -type d -exec cp -r --parents -t "$tests" {} +
	for package in "${packages[@]}"; do
		compgen -G "$package/*_test.go" >/dev/null || continue
		mkdir -p "$tests/$package"
		if "${mode[@]}" -c -o "$tests/$package/a.test" "$package"; then
			echo "$package" >>"$plan"
		else
			echo "FAIL $package does not compile"
			failed=1
		fi
	done
}

# build_agent builds what tests would build, and a compiler that has it ready.
build_agent() {
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$1/sluice" ./cmd/sluice
	mkdir "$1/bin"
	cat >"$1/bin/go" <<-'EOF'
		#!/bin/sh
		[ "$1" = list ] && exec echo / # the folder of the module, which is not here
		while [ "$1" != -o ]; do shift; done
		exec cp /sluice "$2"
	EOF
	chmod +x "$1/bin/go"
}

# build_root makes what the machine of an architecture has.
build_root() {
	mkdir -p "$1"/{etc,tests}
	build_tests "$1/tests" "$1/etc/plan"
	build_agent "$1"
	echo "${SLUICE_TEST_RUN:-.}" >"$1/etc/run"
	echo "${SLUICE_TEST_SECONDS:-2400}s" >"$1/etc/timeout"
	cp "$here/init" "$1/init"
}

# write_matrix puts rows at the end of a file, in the place of those of the same kernels and
# packages.
write_matrix() {
	awk -F'|' 'FNR == NR { ours[$2, $3]; next } !(($2, $3) in ours)' "$1" "$2" >"$2.new"
	cat "$1" >>"$2.new"
	mv "$2.new" "$2"
}

failed=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

install_missing
: >"$work/rows"
for version; do
	case $version in
	*-arm64) export GOARCH=arm64 ;;
	*) export GOARCH=amd64 ;;
	esac
	root=$work/$GOARCH
	[[ -d $root ]] || build_root "$root"
	kernel=$("$here/kernel.sh" "$version" | tail -n 1)
	log=$(dirname "$kernel")/$version
	exec {lock}>"$log.lock"
	flock "$lock"
	# The emulation of a busy machine has errors of its own: a kernel may panic before the first test.
	for try in 1 2; do
		rm -f "$log".{console,tests}
		setpriv --pdeathsig TERM "$here/machine.sh" "$kernel" "$root" "$log" || echo "The machine of Linux $version was ended."
		[[ ! -s $log.tests ]] || break
		echo "Boot $try of Linux $version ended before the first test:" "$(grep -a 'Kernel panic' "$log.console")"
	done
	if ! awk -v rows="$work/rows" -v today="$(date +%F)" -f "$here/summary.awk" "$root/etc/plan" "$log.tests"; then
		echo "  see $log.tests and $log.console"
		failed=1
	fi
	exec {lock}>&-
done
if [[ -n ${SLUICE_TEST_MATRIX:-} ]]; then
	write_matrix "$work/rows" "$SLUICE_TEST_MATRIX"
fi
exit $failed
