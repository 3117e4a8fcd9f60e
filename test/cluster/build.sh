#!/usr/bin/env bash
#
# build.sh [NAME]...
#
# Builds the servers and tools that package cluster runs, from the modules that pin
# them: binaries/ has Kubernetes and etcd, runtime/ has containerd and CoreDNS. Without
# names, those of the control plane's core: etcd, kube-apiserver, kubectl and
# kube-proxy. The last line of its output is the folder they are in:
#
#   ${SLUICE_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice/cluster}/<version key>
#
# What is there already is not built again, and then neither network nor module
# cache is needed. A binary appears whole or not at all, and callers at the same
# time wait for each other.

set -euo pipefail

cache=${SLUICE_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice/cluster}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)

cd "$(dirname "${BASH_SOURCE[0]}")"

export CGO_ENABLED=0 GOWORK=off

version=$(awk '$1 == "k8s.io/kubernetes" { print $2 }' binaries/go.mod)
IFS=. read -r major minor _ <<<"${version#v}"

# In place of what Kubernetes takes from its git tree. client-go's version is
# what the user agent reports.
ldflags='-s -w'
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	ldflags+=" -X $package.gitVersion=$version -X $package.gitTreeState=clean"
	ldflags+=" -X $package.gitMajor=$major -X $package.gitMinor=$minor"
done

# The tags are those of Kubernetes' own releases, except for SELinux.
# Debug information would be a sixth of the compiler's work.
flags=(-mod=readonly -trimpath "-tags=notest,grpcnotrace" -gcflags=all=-dwarf=false "-ldflags=$ldflags")

key=$({
	go env GOVERSION GOOS GOARCH
	echo "${flags[@]}"
	cat {binaries,runtime}/go.{mod,sum} runtime/coredns/main.go
} | sha256sum | cut -c1-12)
folder=$cache/$version-$key

# source_of prints a module and a package of it.
source_of() {
	case $1 in
	etcd) echo binaries go.etcd.io/etcd/server/v3 ;;
	kube-* | kubectl | kubelet) echo "binaries k8s.io/kubernetes/cmd/$1" ;;
	containerd | containerd-shim-runc-v2 | ctr) echo "runtime github.com/containerd/containerd/v2/cmd/$1" ;;
	coredns) echo runtime ./coredns ;;
	*)
		echo "test/cluster/build.sh: no binary is called $1" >&2
		return 1
		;;
	esac
}

if [[ $# -eq 0 ]]; then
	set -- etcd kube-apiserver kubectl kube-proxy
fi

mkdir -p "$folder"
exec {lock}>"$folder/.lock"
flock "$lock"

for name; do
	source=$(source_of "$name")
	if [[ -x $folder/$name ]]; then
		continue
	fi
	echo "test/cluster/build.sh: building $name, which may take minutes" >&2
	SECONDS=0
	go -C "${source% *}" build "${flags[@]}" -o "$folder/.$name.new" "${source#* }"
	mv "$folder/.$name.new" "$folder/$name"
	echo "test/cluster/build.sh: built $name in $SECONDS s" >&2
done

echo "$folder"
