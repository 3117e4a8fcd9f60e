package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/bench/report"
)

// describe writes down where and how the run is made.
func (b *bencher) describe() error {
	machine, err := report.ReadMachine()
	if err != nil {
		return err
	}
	b.report.Environment = report.Environment{
		Machine:   machine,
		Command:   strings.Join(os.Args, " "),
		Started:   time.Now(),
		Sides:     append([]string{report.Ref}, b.proxies...),
		Services:  b.services,
		Endpoints: b.endpoints,
		Rounds:    b.rounds,
		WarmUp:    b.warmUp,
		Duration:  b.duration,
		Starts:    b.starts,
		Clients:   b.clients,
		Rate:      b.rate,
		Churn:     b.churn,
		Changes:   b.changes,
		Versions:  make(map[string]string),
	}
	for program, args := range map[string][]string{
		"iptables": {"iptables", "--version"}, "nft": {"nft", "--version"}, "iperf3": {"iperf3", "--version"},
	} {
		out, err := exec.Command(args[0], args[1:]...).Output()
		if err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
		b.report.Environment.Versions[program], _, _ = strings.Cut(string(out), "\n")
	}

	return nil
}
