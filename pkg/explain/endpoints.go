package explain

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/status"
)

// listEndpoints sets the endpoints: the eligible ones from the maps, and the others from the agent.
func (i *inquiry) listEndpoints(ctx context.Context) error {
	if i.key.Port == 0 {
		return nil
	}
	pool, ids := i.answer.Pool, []uint32{}
	for slot := range pool.SlotCount {
		id := i.Maps.Slots.Get(pool.SlotBase + slot)
		backend, ok := i.Maps.BackendOf(id)
		if !ok {
			continue
		}
		suspect, err := status.SuspectOf(&i.Maps.Tables, id)
		if err != nil {
			return err
		}
		ids = append(ids, id)
		i.Endpoints = append(i.Endpoints, Endpoint{
			Endpoint:    status.Endpoint{Address: backend.AddrPort(), Eligible: true},
			Connections: max(0, i.Maps.Loads.Load(id).Live()), Suspect: suspect,
		})
	}
	if i.outcome() == Translated {
		odds, err := i.odds(ids)
		if err != nil {
			return err
		}
		for n := range ids {
			i.Endpoints[n].Odds = odds[n]
			if odds[n] > 0 && i.atDevice {
				if err := i.describeTranslation(&i.Endpoints[n], ids[n]); err != nil {
					return err
				}
			}
		}
	}
	name, _, _ := strings.Cut(i.Service, ":")
	selection, err := i.Agent.Selection(ctx, name, i.key)
	if errors.Is(err, status.ErrNotRunning) {
		err = status.ErrNotRunning // without the path of the socket
	}
	if err != nil {
		i.missing("endpoints that are not eligible, and why: %v", err)
		sortEndpoints(i.Endpoints)

		return nil
	}
	if selection.Error != "" {
		i.missing("the Service is not in the maps as it should be: %s", selection.Error)
	}
	for _, text := range selection.Contested {
		i.step("contested", "%s", text)
	}
	i.step("policy", "traffic policy %s", selection.Policy)
	for _, e := range selection.Endpoints {
		at := slices.IndexFunc(i.Endpoints, func(known Endpoint) bool { return known.Address == e.Address })
		switch {
		case at >= 0:
			i.Endpoints[at].Node, i.Endpoints[at].Zone, i.Endpoints[at].Local = e.Node, e.Zone, e.Local
		case e.Eligible: // it has just become so
		default:
			i.Endpoints = append(i.Endpoints, Endpoint{Endpoint: e})
		}
	}
	sortEndpoints(i.Endpoints)

	return nil
}

func sortEndpoints(endpoints []Endpoint) {
	slices.SortFunc(endpoints, func(a, b Endpoint) int {
		if a.Eligible != b.Eligible {
			return map[bool]int{true: -1, false: 1}[a.Eligible]
		}

		return a.Address.Compare(b.Address)
	})
}

// draws is how often a backend is picked to estimate odds that depend on the load of backends, or on
// suspects.
const draws = 400

// odds returns the probability of each of these backends of the pool.
func (i *inquiry) odds(ids []uint32) ([]float64, error) {
	odds := make([]float64, len(ids))
	pool, ask := i.answer.Pool, i.dial
	if i.atDevice {
		ask = func() (bpf.Answer, error) { return i.arrive(0) }
	}
	counted := func(id uint32, share float64) {
		if n := slices.Index(ids, id); n >= 0 {
			odds[n] += share
		}
	}
	switch {
	case i.answer.Affinity > 0, pool.Algorithm == maps.AlgorithmDH, pool.Algorithm == maps.AlgorithmSH:
		counted(i.answer.Backend, 1)
	case slices.ContainsFunc(i.Endpoints, func(e Endpoint) bool { return e.Suspect != nil }):
		return odds, i.draw(ask, counted)
	case maps.Hashes(pool.Algorithm) && pool.TableSize > 0:
		for slot := range pool.TableSize {
			counted(i.Maps.Slots.Get(pool.TableBase+slot), 1/float64(pool.TableSize))
		}
	case pool.Algorithm == maps.AlgorithmRandom, pool.Algorithm == maps.AlgorithmRR:
		for n := range odds {
			odds[n] = 1 / float64(len(odds))
		}
	default:
		return odds, i.draw(ask, counted)
	}

	return odds, nil
}

// draw counts the backends of some draws.
func (i *inquiry) draw(ask func() (bpf.Answer, error), counted func(id uint32, share float64)) error {
	for range draws {
		answer, err := ask()
		if err != nil {
			return err
		}
		counted(answer.Backend, 1./draws)
	}

	return nil
}

// describeTranslation sets what a backend sees as the client, and how its packets leave.
func (i *inquiry) describeTranslation(e *Endpoint, id uint32) error {
	answer, err := i.arrive(id)
	if err != nil {
		return err
	}
	e.Client = i.question.From.String()
	if answer.Masks {
		e.Client = answer.Masquerade.String()
	}
	if answer.Reason != maps.ReasonTranslated {
		e.Client, e.Reason = "", answer.Reason.String()
	}
	if answer.Turns != 0 {
		e.Way = "turned around, without the stack of this node"
	}
	if answer.TableFull && len(i.Beyond) == 0 {
		i.Beyond = append(i.Beyond, "the table of flows is full: unless a connection that has ended makes room, this one is refused (drop_flow_table)")
	}

	return nil
}
