package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The table of docs/operate.md: who translates what clients of all kinds dial. Each flag that takes a way of a packet from one
// place of translation leaves another one, or status tells what is not translated: for each of its values clients reach
// what they dial by each protocol, over UDP from sockets that connect and from those that do not; or status has the limit.
//
//	pod, pod without socket hooks, node, outside ── ClusterIP, node port, external IP ─┬─ pod-1-0
//	                                                                                     └─ pod-2-0
func TestEachSwitchLeavesAWay(t *testing.T) {
	const (
		ofNode  = "SCTP of this node's own processes to Services"
		uplinks = "what arrives for Services by eth0"
		pods    = "send to Services past their sockets"
		udp     = "UDP from there to Services is not translated"
	)
	nodesSCTP, atDevices, outside := []string{"node/sctp"}, []string{"pod/sctp", "guest/tcp", "guest/udp", "guest/sctp"}, []string{"outside/tcp", "outside/udp", "outside/sctp"}
	w := mustWays(t)
	for _, test := range []struct {
		flags string
		none  []string // translates a client's packets of a protocol, beside those of nodesSCTP
		told  []string // by status, beside ofNode
	}{
		{flags: "--udp=all"},
		{flags: "--udp=off"},
		{flags: "--forwarding=auto"},
		{flags: "--forwarding=stack"},
		{flags: "--device-attach=clsact"},
		{flags: "--pod-opt-out=true"},
		{flags: "--heal=off --handshake-metrics=false"},
		{flags: "--heal=eject"},
		{flags: "--heal=resteer"},
		{flags: "--masquerade-all --mark=0x10/0x10"},
		{flags: "--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=pod"},
		{flags: "--devices=eth0,pod*=pods"},
		{flags: "--exclude-devices=eth0", none: outside, told: []string{uplinks}},
		{flags: "--devices=eth0", none: atDevices, told: []string{pods}},
		{flags: "--devices=eth0 --udp=off", none: append(atDevices, "pod/udp"), told: []string{pods, udp}},
	} {
		t.Run(test.flags, func(t *testing.T) {
			mustTellLimits(t, w.Agent, strings.Fields(test.flags), append(test.told, ofNode), []string{ofNode, uplinks, pods, udp})
			for _, c := range w.Clients() {
				for _, network := range []string{"tcp", "udp", "sctp"} {
					cell := c.Name + "/" + network
					w.play(t, c, network, !slices.Contains(test.none, cell) && !slices.Contains(nodesSCTP, cell))
				}
			}
		})
	}
}

// mustTellLimits restarts an agent with flags, and checks which of all texts its status has.
func mustTellLimits(t *testing.T, agent *sluice.Node, flags, want, all []string) {
	t.Helper()
	lab.Must(t, agent.Stop())
	agent.SetArgs(flags...)
	lab.Must(t, agent.Start(), agent.WaitSynced(t.Context()))
	lab.EventuallyIn(t, waitTimeout, "status tells what is not translated", func() error {
		out, err := agent.Run("status")
		for _, text := range all {
			if strings.Contains(out, text) != slices.Contains(want, text) {
				return fmt.Errorf("%q, want %v: %v\n%s", text, slices.Contains(want, text), err, out)
			}
		}

		return nil
	})
	lab.EventuallyIn(t, waitTimeout, "devices are attached as they should be", func() error {
		status, err := agent.Status()
		for _, d := range status.Devices {
			if d.Problem != "" {
				err = errors.Join(err, fmt.Errorf("%s: %s", d.Name, d.Problem))
			}
		}

		return err
	})
}

// ways is a testbed with a Service of all protocols, which both families of both pods serve.
type ways struct {
	*testbed
	pods []*lab.Pod
	web  *corev1.Service
	v4   string // external IPs
	v6   string
	port uint16 // the last source port of an association
}

func mustWays(t *testing.T) *ways {
	t.Helper()
	w := &ways{testbed: mustTestbed(t), port: 4000}
	w.pods = []*lab.Pod{w.Local()[0], w.Remote()[0]}
	for _, pod := range w.pods {
		for _, ip := range []netip.Addr{pod.IPv4, pod.IPv6} {
			go lab.MustSCTP(t, pod.Namespace, ip, scene.PodPort).Serve()
		}
	}
	for _, family := range object.Families {
		slice := w.Slice("web", family, scene.ReadyAll(w.pods...)...)
		slice.Ports = append(slice.Ports, object.EndpointPort("sctp", corev1.ProtocolSCTP, scene.PodPort))
		w.PutSlice(t, slice)
	}
	w.v4, w.v6 = scene.VirtualIPs()
	w.web = w.CreateService(t, "web", scene.NodePort, scene.ExternalIPs(w.v4, w.v6), func(svc *corev1.Service) {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "sctp", Port: 80, Protocol: corev1.ProtocolSCTP})
	})

	return w
}

// play has a client dial all that there is by a protocol. It is answered if that is translated.
func (w *ways) play(t *testing.T, c *scene.Client, network string, translated bool) {
	t.Helper()
	at := slices.Index([]string{"tcp", "udp", "sctp"}, network)
	node, port := w.Lab.Nodes[0], w.web.Spec.Ports[at].NodePort
	for what, addresses := range map[string][]string{
		"node port":   {scene.At(node.IPv4.String(), port), scene.At(node.IPv6.String(), port)},
		"external IP": {scene.At(w.v4, 80), scene.At(w.v6, 80)},
		"ClusterIP":   {scene.At(w.web.Spec.ClusterIPs[0], 80), scene.At(w.web.Spec.ClusterIPs[1], 80)},
	} {
		for _, address := range addresses {
			dial := c.To(network, address)
			switch {
			case network == "sctp":
				w.associates(t, c, what, address, translated)
			case translated:
				scene.MustReach(t, dial, scene.Names(w.pods...)...)
			default:
				x := dial.Exchange()
				x.Timeout = unansweredTime
				if answer, err := c.Exchange(x); err == nil {
					t.Errorf("%s of %s to the %s %s is answered by %q, although nothing translates it", network, c.Name, what, address, answer.Text)
				}
			}
		}
		if network == "udp" && translated {
			lab.EventuallyIn(t, countsAge, "a datagram of "+c.Name+" to the "+what+" is answered", func() error {
				by, err := askUnconnected(c, addresses[0])
				if err == nil && !slices.Contains(scene.Names(w.pods...), by) {
					err = fmt.Errorf("%s answers", by)
				}

				return err
			})
		}
	}
}

// unansweredTime is how long a client waits for an answer that must not come.
const unansweredTime = 200 * time.Millisecond

// associates begins an association. Each has a port of its own.
func (w *ways) associates(t *testing.T, c *scene.Client, what, address string, translated bool) {
	t.Helper()
	server := netip.MustParseAddrPort(address)
	ip := map[bool]netip.Addr{false: c.IPv4, true: c.IPv6}[server.Addr().Is6()]
	if !ip.IsValid() { // the node's
		ip = map[bool]netip.Addr{false: w.Lab.Nodes[0].IPv4, true: w.Lab.Nodes[0].IPv6}[server.Addr().Is6()]
	}
	begin := func(timeout time.Duration) error {
		w.port++
		_, err := lab.MustSCTP(t, c.Namespace, ip, w.port).Associate(server, timeout)

		return err
	}
	if !translated {
		if begin(unansweredTime) == nil {
			t.Errorf("SCTP of %s to the %s %s is answered, although nothing translates it", c.Name, what, address)
		}

		return
	}
	lab.EventuallyIn(t, countsAge, "SCTP of "+c.Name+" to the "+what+" "+address+" is answered", func() error { return begin(time.Second) })
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
