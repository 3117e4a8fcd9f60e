package main

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
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

// noteStolen notes how much time the hypervisor gave to other guests.
func (b *bencher) noteStolen() {
	if len(b.stolen) == 0 || !b.report.Environment.Machine.Hypervisor {
		return
	}
	slices.Sort(b.stolen)
	b.report.Environment.Notes = append(b.report.Environment.Notes, fmt.Sprintf(
		"The hypervisor gave other guests %.0f %% of the processors' time in the median measurement of traffic, %.0f %% in one of ten, %.0f %% in the worst; above %.0f %%, the best of %d attempts counts.",
		100*b.stolen[len(b.stolen)/2], 100*b.stolen[len(b.stolen)*9/10], 100*b.stolen[len(b.stolen)-1], 100*tolerable, attempts))
}
