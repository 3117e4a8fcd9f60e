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
		flows, err := List(m, "", maps.Now())
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
// first: unused addresses of Service CIDRs, then unused ports of ClusterIPs, which are the frontends of port 0.
func withdraw(m maps.Tables) error {
	if err := empty(m.ServiceCIDRs, func(maps.CIDRKey) bool { return true }); err != nil {
		return fmt.Errorf("service CIDRs: %w", err)
	}
	for _, ofPort0 := range []bool{true, false} {
		err := empty(m.FrontendIDs, func(k maps.FrontendKey) bool { return (k.Port == 0) == ofPort0 })
		if err != nil {
			return fmt.Errorf("frontends: %w", err)
		}
	}

	return nil
}

// empty deletes the entries of a table whose keys match. Reading ends first: after a deletion it would begin again.
func empty[K comparable, V any](t maps.Table[K, V], matches func(K) bool) error {
	var keys []K
	for e, err := range t.All() {
		if err != nil {
			return err
		}
		if matches(e.Key) {
			keys = append(keys, e.Key)
		}
	}
	for _, k := range keys {
		if err := t.Delete(k); err != nil {
			return err
		}
	}

	return nil
}
