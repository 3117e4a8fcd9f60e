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

// setConntrack sets the kernel's own connection tracking as kube-proxy would.
// Whoever needs it is not Sluice, so a failure is no reason to stop.
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
		log.Info("set the kernel's own connection tracking", "sysctls", set)
	}
	switch {
	case errors.Is(err, node.ErrNoConntrack):
		log.Info("conntrack settings are left out", "reason", err)
	case err != nil:
		log.Warn("not all conntrack settings are in force; Sluice does not need them", "error", err)
	}
}

// kubeletOOMScore is the oom_score_adj that the kubelet gives pods with the
// priority system-node-critical. Lower than that is only for what must not end
// even before the kubelet itself does.
const kubeletOOMScore = -997

// setOOMScore sets how soon the kernel ends this process when memory runs out. A
// score lower than the container runtime's takes SYS_RESOURCE, which the DaemonSet
// does not ask for: the kubelet's is low enough, and not warned of.
func setOOMScore(score int32, log *slog.Logger) {
	const file = "/proc/self/oom_score_adj"
	err := os.WriteFile(file, []byte(strconv.Itoa(int(score))), 0)
	if err == nil {
		return
	}
	text, _ := os.ReadFile(file) // of the two errors, the first says more
	have, unknown := strconv.Atoi(strings.TrimSpace(string(text)))
	level := slog.LevelWarn
	if unknown == nil && isLowEnough(have, int(score)) {
		level = slog.LevelInfo
	}
	log.Log(context.Background(), level, "oom_score_adj stays as it is", "oomScoreAdj", have, "configured", score, "error", err)
}

// isLowEnough reports whether a score protects as is configured, or as the kubelet
// would.
func isLowEnough(have, configured int) bool { return have <= max(kubeletOOMScore, configured) }
