package flow

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// drainInterval is how often [Drain] looks for open flows, restFactor permitting.
const drainInterval = time.Second

// udpDrained is the time without a packet after which [Drain] ends a UDP flow: the next packet is a new one's.
const udpDrained = 10 * time.Second

// Drain makes programs pass new connections untranslated, and waits until no flow of devices is open, until the
// timeout, or until ctx ends. It returns how many flows are open then. Before the first new connection is passed, and
// each time that it has looked, it calls look with those that are open. It must be called while no agent runs: an agent
// that starts programs all Services again.
//
// UDP flows without a packet for udpDrained are over.
func Drain(ctx context.Context, m *maps.Pinned, timeout time.Duration, look func(open []Flow)) (int, error) {
	sweeper, err := New(Config{Maps: m, Timeouts: Timeouts{UDPAnswered: udpDrained}.orDefault().inEmergency()})
	if err != nil {
		return 0, err
	}
	deadline := time.Now().Add(timeout)
	for withdrawn := false; ; withdrawn = true {
		if _, err := sweeper.Sweep(); err != nil {
			return 0, err
		}
		flows, err := List(m, "", Now())
		if err != nil {
			return 0, err
		}
		open := slices.DeleteFunc(flows, func(f Flow) bool { return f.State == Closed })
		look(open)
		if !withdrawn {
			if err := withdraw(m.Tables); err != nil {
				return len(open), err
			}

			continue // a flow may have begun since it looked
		}
		left := time.Until(deadline)
		if len(open) == 0 || left <= 0 {
			return len(open), nil
		}
		select {
		case <-ctx.Done():
			return len(open), ctx.Err()
		case <-time.After(min(left, max(drainInterval, restFactor*sweeper.took))):
		}
	}
}

// withdraw deletes what programs look up for a new connection, so that they pass it. What refuses connections goes
// first: unused addresses of Service CIDRs, then unused ports of ClusterIPs.
func withdraw(m maps.Tables) error {
	for e, err := range m.ServiceCIDRs.All() {
		if err == nil {
			err = m.ServiceCIDRs.Delete(e.Key)
		}
		if err != nil {
			return fmt.Errorf("service CIDRs: %w", err)
		}
	}
	for _, catchAlls := range []bool{true, false} {
		for e, err := range m.FrontendIDs.All() {
			if err == nil && (e.Key.Port == 0) == catchAlls {
				err = m.FrontendIDs.Delete(e.Key)
			}
			if err != nil {
				return fmt.Errorf("frontends: %w", err)
			}
		}
	}

	return nil
}
