package main

import (
	"errors"
	"log/slog"
	"os"
	"strconv"

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

// setOOMScore says how soon the kernel ends this process when memory runs out.
func setOOMScore(score int32, log *slog.Logger) {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(int(score))), 0); err != nil {
		log.Warn("oom_score_adj is not as configured", "oomScoreAdj", score, "error", err)
	}
}
