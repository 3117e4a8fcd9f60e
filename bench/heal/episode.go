package main

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/test/lab"
)

// episode is something that happens to backends, of which the control plane learns nothing.
type episode struct {
	name, title string
	// hit are the backends to which it happens. That one of the others is passed over is wrong.
	hit func(s *side) []*lab.Pod
	// begin makes it happen, and returns when it does. What it returns ends it.
	begin func(s *side) (end func() error, err error)
}

// flapPeriod is how long a flapping backend is up, and then down.
const flapPeriod = time.Second

var episodes = []episode{
	{
		name: "vanish", title: "the packets of one node vanish, and those of its pods", hit: ofVictim,
		begin: func(s *side) (func() error, error) { return drop(s.victim(), "meta nfproto ipv4 drop") },
	},
	{
		name: "refuse", title: "the processes of one node's backends have ended: its pods refuse", hit: ofVictim,
		begin: func(s *side) (func() error, error) { return refuse(s, ofVictim(s)) },
	},
	{
		name: "loss", title: "of the packets to one node 30 % get lost", hit: ofVictim,
		begin: func(s *side) (func() error, error) {
			return drop(s.victim(), `iifname "eth0" numgen random mod 10 < 3 drop`)
		},
	},
	{
		name: "lossy-service", title: "of the packets to all backends 30 % get lost", hit: (*side).backends,
		begin: func(s *side) (func() error, error) {
			return atEach(s.Nodes[1:], func(node *lab.Node) (func() error, error) {
				return drop(node, `iifname "eth0" numgen random mod 10 < 3 drop`)
			})
		},
	},
	{
		name: "slow-service", title: "the answers of all backends are 300 ms late", hit: (*side).backends,
		begin: func(s *side) (func() error, error) {
			return atEach(s.backends(), func(pod *lab.Pod) (func() error, error) {
				return delay(pod, 300*time.Millisecond)
			})
		},
	},
	{
		name: "flap-refuse", title: "the process of one backend ends and starts again, every second", hit: firstOfVictim,
		begin: func(s *side) (func() error, error) {
			return flap(func() (func() error, error) { return refuse(s, firstOfVictim(s)) })
		},
	},
	{
		name: "flap-vanish", title: "the packets of one backend vanish for every other second", hit: firstOfVictim,
		begin: func(s *side) (func() error, error) {
			address := firstOfVictim(s)[0].IPv4

			return flap(func() (func() error, error) {
				return drop(s.victim(), fmt.Sprintf("ip daddr %s drop", address))
			})
		},
	},
}

func ofVictim(s *side) []*lab.Pod      { return s.victim().Pods }
func firstOfVictim(s *side) []*lab.Pod { return s.victim().Pods[:1] }

// drop makes a rule see the node's packets before anything else of netfilter does.
func drop(node *lab.Node, rule string) (end func() error, err error) {
	end = func() error { return node.Netfilter("delete table inet episode") }

	return end, node.Netfilter(fmt.Sprintf(`table inet episode {
		chain early {
			type filter hook prerouting priority raw - 100;
			%s
		}
	}`, rule))
}

// each does something with all pods.
func each(pods []*lab.Pod, do func(*lab.Pod) error) error {
	var err error
	for _, pod := range pods {
		err = errors.Join(err, do(pod))
	}

	return err
}

// refuse ends the processes of pods, whose kernels then refuse, until its end starts them again.
func refuse(s *side, pods []*lab.Pod) (end func() error, err error) {
	return func() error { return each(pods, s.serve) }, each(pods, s.kill)
}

// atEach begins something in several places at once, and ends it where it has begun.
func atEach[T any](places []T, begin func(T) (end func() error, err error)) (end func() error, err error) {
	ends := make([]func() error, len(places))
	var begins errgroup.Group
	for i, place := range places {
		begins.Go(func() error {
			end, err := begin(place)
			if err == nil {
				ends[i] = end
			}

			return err
		})
	}
	err = begins.Wait()

	return func() error {
		var group errgroup.Group
		for _, end := range ends {
			if end != nil {
				group.Go(end)
			}
		}

		return group.Wait()
	}, err
}

// flap lets something begin and end in turns, and at last end.
func flap(begin func() (end func() error, err error)) (end func() error, err error) {
	last, err := begin()
	if err != nil {
		return last, err
	}
	stop, ended := make(chan struct{}), make(chan error)
	go func() {
		turns := time.NewTicker(flapPeriod)
		defer turns.Stop()
		down := true
		var err error
		for {
			select {
			case <-turns.C:
				if err != nil {
					continue
				}
				if down = !down; down {
					last, err = begin()
				} else {
					err = last()
				}
			case <-stop:
				if down {
					err = errors.Join(err, last())
				}
				ended <- err

				return
			}
		}
	}()

	return func() error {
		close(stop)

		return <-ended
	}, nil
}
