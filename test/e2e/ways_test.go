package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// Each flag that takes a way of a packet from one place of translation leaves another one: for each of its values,
// clients of all kinds reach what they dial, over TCP and UDP, from sockets that connect and from those that do not.
//
//	pod, pod without socket hooks, node, outside ── ClusterIP, node port, external IP ─┬─ pod-1-0
//	                                                                                     └─ pod-2-0
func TestEachSwitchLeavesAWay(t *testing.T) {
	s := mustTestbed(t)
	pods := []*lab.Pod{s.Local()[0], s.Remote()[0]}
	s.SetEndpoints(t, "web", scene.ReadyAll(pods...)...)
	v4, v6 := scene.VirtualIPs()
	web := s.CreateService(t, "web", scene.NodePort, scene.ExternalIPs(v4, v6))
	node := s.Lab.Nodes[0]
	destinations := func(c *scene.Client, port int32) map[string][]string {
		to := map[string][]string{
			"node port":   {scene.At(node.IPv4.String(), port), scene.At(node.IPv6.String(), port)},
			"external IP": {scene.At(v4, 80), scene.At(v6, 80)},
		}
		if c != s.Outside { // which has no route to it
			to["ClusterIP"] = []string{scene.At(web.Spec.ClusterIPs[0], 80), scene.At(web.Spec.ClusterIPs[1], 80)}
		}

		return to
	}
	for _, flag := range []string{
		"--udp=all", "--udp=connected", "--udp=off",
		"--forwarding=stack", "--device-attach=clsact", "--pod-opt-out=true", "--heal=off", "--heal=resteer",
	} {
		t.Run(flag, func(t *testing.T) {
			sluice.MustRestart(t, s.Agent, flag)
			for _, c := range s.Clients() {
				for i, network := range []string{"tcp", "udp"} {
					for _, addresses := range destinations(c, web.Spec.Ports[i].NodePort) {
						for _, address := range addresses {
							scene.MustReach(t, c.To(network, address), scene.Names(pods...)...)
						}
					}
				}
				for what, addresses := range destinations(c, web.Spec.Ports[1].NodePort) {
					lab.EventuallyIn(t, countsAge, "a datagram of "+c.Name+" to the "+what+" is answered", func() error {
						by, err := askUnconnected(c, addresses[0])
						if err == nil && !slices.Contains(scene.Names(pods...), by) {
							err = fmt.Errorf("%s answers", by)
						}

						return err
					})
				}
			}
		})
	}
}

// askUnconnected sends a datagram by a socket that names no peer, and returns which pod has answered. The
// answer must come from the address that it was sent to.
func askUnconnected(c *scene.Client, address string) (string, error) {
	socket, err := c.Socket("udp4")
	if err != nil {
		return "", err
	}
	defer socket.Close()
	if c.IPv4.IsValid() && !c.AtSocket {
		if err := socket.Bind(scene.At(c.IPv4.String(), 0)); err != nil {
			return "", err
		}
	}
	if err := socket.SetTimeout(time.Second); err != nil {
		return "", err
	}
	if err := socket.SendTo("who\n", address); err != nil {
		return "", err
	}
	text, from, err := socket.Recv()
	if err != nil {
		return "", err
	}
	if from.String() != address {
		return from.String(), nil
	}
	answer, err := lab.ParseAnswer(text)

	return answer.Name, err
}
