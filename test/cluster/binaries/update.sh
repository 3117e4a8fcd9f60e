#!/usr/bin/env bash
#
# update.sh VERSION
#
# Moves this module to another Kubernetes, say v1.37.2. The staging modules
# k8s.io/* follow (v0.36.3), and all other modules get the versions that
# Kubernetes itself is built with; among them is etcd.

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"

export GOWORK=off

version=$1
staging=v0.${version#v1.}
upstream=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')

cat >go.mod <<END
// The servers and tools that package cluster runs: build.sh builds them,
// update.sh writes this file.
module github.com/sluice-lb/sluice/test/cluster/binaries

$(sed -n '/^go /p; /^godebug /p' "$upstream")

tool (
	go.etcd.io/etcd/server/v3
	k8s.io/kubernetes/cmd/kube-apiserver
	k8s.io/kubernetes/cmd/kube-controller-manager
	k8s.io/kubernetes/cmd/kube-proxy
	k8s.io/kubernetes/cmd/kube-scheduler
	k8s.io/kubernetes/cmd/kubectl
	k8s.io/kubernetes/cmd/kubelet
)

require k8s.io/kubernetes $version

// Kubernetes takes these from its own tree.
replace (
$(awk -v staging="$staging" '$2 == "=>" { printf "\t%s => %s %s\n", $1, $1, staging }' "$upstream")
)
END
rm -f go.sum
go mod tidy
