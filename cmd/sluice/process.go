package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/node"
)

// setConntrack sets the sysctls of the kernel's conntrack as kube-proxy would.
// Sluice does not use conntrack, other programs on the node may: so a failure is
// logged, and the agent goes on.
func setConntrack(kp *config.KubeProxy, log *slog.Logger) {
	ct := kp.Conntrack
	set, err := node.Conntrack{
		MaxPerCore: int(*ct.MaxPerCore), Min: int(*ct.Min),
		TCPEstablished: ct.TCPEstablishedTimeout.Duration,
		TCPCloseWait:   ct.TCPCloseWaitTimeout.Duration,
		TCPBeLiberal:   ct.TCPBeLiberal,
		UDPUnanswered:  ct.UDPTimeout.Duration,
		UDPAnswered:    ct.UDPStreamTimeout.Duration,
	}.Set()
	if len(set) > 0 {
		log.Info("conntrack sysctls are set", "sysctls", set)
	}
	switch {
	case errors.Is(err, node.ErrNoConntrack):
		log.Info("conntrack sysctls are not set", "reason", err)
	case err != nil:
		log.Warn("some conntrack sysctls cannot be set; Sluice does not need them", "error", err)
	}
}

// kubeletOOMScore is the oom_score_adj that the kubelet gives pods with the
// priority class system-node-critical.
const kubeletOOMScore = -997

// setOOMScore sets this process' oom_score_adj. A score lower than the container
// runtime's takes SYS_RESOURCE, which the DaemonSet does not request: the score that
// the kubelet has set is low enough, and is logged without a warning.
func setOOMScore(score int32, log *slog.Logger) {
	const file = "/proc/self/oom_score_adj"
	err := os.WriteFile(file, []byte(strconv.Itoa(int(score))), 0)
	if err == nil {
		return
	}
	text, _ := os.ReadFile(file) // of the two errors, the first one is logged
	have, unknown := strconv.Atoi(strings.TrimSpace(string(text)))
	level := slog.LevelWarn
	if unknown == nil && isLowEnough(have, int(score)) {
		level = slog.LevelInfo
	}
	log.Log(context.Background(), level, "oom_score_adj stays as it is", "oomScoreAdj", have, "configured", score, "error", err)
}

// isLowEnough reports whether a score protects this process at least as well as the
// configured one, or as the kubelet's.
func isLowEnough(have, configured int) bool { return have <= max(kubeletOOMScore, configured) }
