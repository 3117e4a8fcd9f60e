package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// limits are what status has of a way that no program translates.
const (
	sctpOfNode       = "SCTP of this node's own processes to Services"
	outsideOfCgroup  = "what processes of the node send over TCP is not"
	byUplink         = "what arrives for Services by eth0"
	pastSockets      = "send to Services past their sockets"
	datagramsOfPods  = "UDP from there to Services is not translated"
	atLoopback       = "node ports on loopback addresses of IPv4 and IPv6"
	atAllButLoopback = "node ports on all but loopback addresses of IPv4 and IPv6"
	gateIsOff        = "is not in use: the feature gate AllowServiceExternalIPs is off"
)

var allLimits = []string{sctpOfNode, outsideOfCgroup, byUplink, pastSockets, datagramsOfPods, atLoopback, atAllButLoopback, gateIsOff}

// switchRow is a setting of flags, and what follows from it for the ways of packets.
type switchRow struct {
	flags string
	// none are patterns CLIENT/PROTOCOL/WAY of what no program translates, and told the limits that status has: beside those
	// that every row has.
	none, told []string
	// one is set if the algorithm may give a client one backend again and again.
	one bool
}

var switchRows = []switchRow{
	{flags: "--udp=all --forwarding=auto --heal=eject --handshake-metrics=true --algorithm=random --pod-opt-out=false " +
		"--iptables-localhost-nodeports=true --masquerade-all=false --device-attach=tcx"},
	{flags: "--udp=off --algorithm=rr"},
	{flags: "--forwarding=stack --algorithm=lc --service-metrics=0 --backend-metrics=10", one: true},
	{flags: "--device-attach=clsact --nodeport-addresses=all"},
	{flags: "--pod-opt-out=true --algorithm=sed --bind-address=192.168.50.1", one: true},
	{flags: "--heal=off --handshake-metrics=false --algorithm=nq --proxy-mode=iptables", one: true},
	{flags: "--heal=resteer --iptables-localhost-nodeports=false", none: []string{"*/*/localhost"}, told: []string{atLoopback}},
	{flags: "--masquerade-all=true --mark=0x10/0x10 --nodeport-addresses=primary", none: []string{"*/*/localhost"}, told: []string{atLoopback}},
	{flags: "--nodeport-addresses=localhost", none: []string{"*/*/node port*"}, told: []string{atAllButLoopback}},
	{flags: "--nodeport-addresses=192.168.50.0/24,fd00:50::/64,localhost --feature-gates=AllowServiceExternalIPs=false",
		none: []string{"*/*/external IP"}, told: []string{gateIsOff}},
	{flags: "--proxy-mode=nftables --masquerade-all --algorithm=maglev --hash-table-size=251 --hash-seed=ways " +
		"--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=pod", one: true},
	{flags: "--proxy-mode=ipvs --ipvs-scheduler=sh --detect-local-mode=ClusterCIDR --cluster-cidr=10.244.0.0/16,fd00:10:244::/48", one: true},
	{flags: "--algorithm=sh --detect-local-mode=NodeCIDR", one: true},
	{flags: "--algorithm=dh --detect-local-mode=BridgeInterface --pod-bridge-interface=br0", one: true},
	{flags: "--devices=eth0,pod*=pods"},
	{flags: "--exclude-devices=eth0", none: []string{"outside/*/*"}, told: []string{byUplink}},
	{flags: "--devices=eth0", none: []string{"pod/sctp/*", "guest/*/*"}, told: []string{pastSockets}},
	{flags: "--devices=eth0 --udp=off", none: []string{"pod/sctp/*", "guest/*/*", "pod/udp/*"}, told: []string{pastSockets, datagramsOfPods}},
}

// The table of docs/operate.md: who translates what clients of all kinds dial. Each flag that takes a way of a packet from one
// place of translation leaves another one, or status has the limit: for each of its values clients reach what they dial
// by each protocol, over UDP from sockets that connect and from those that do not. [TestEverySwitchHasARow] finds
// flags, and values of them, that have no row.
//
// So do those of a Service whose traffic policies are Local.
//
//	pod, pod without socket hooks, node, process of it ── ClusterIP, node port, localhost, ─┬─ pod-1-0
//	outside of --cgroup-root, client outside              external IP, load balancer        └─ pod-2-0
func TestEachSwitchLeavesAWay(t *testing.T) {
	w := mustWays(t)
	stray := scene.MustClientIn(t, "stray", w.Lab.Nodes[0].Namespace, nil)
	features, err := datapath.ProbeFeatures()
	lab.Must(t, err)
	for i, row := range switchRows {
		t.Run(row.flags, func(t *testing.T) {
			if strings.Contains(row.flags, "=tcx") && !features.TCX {
				t.Skip("this kernel has no tcx (Linux 6.6)")
			}
			mustTellLimits(t, w.Agent, strings.Fields(row.flags), append(row.told, sctpOfNode, outsideOfCgroup))
			clients := w.Clients()
			if i == 0 { // no flag of the agent is about it
				clients = append(clients, stray)
			}
			for _, c := range clients {
				t.Run(c.Name, func(t *testing.T) {
					t.Parallel()
					for _, network := range []string{"tcp", "udp", "sctp"} {
						w.play(t, c, network, row)
					}
				})
			}
		})
	}
}

// leavesOut reports whether no program translates a way of a client's packets.
func (r switchRow) leavesOut(c *scene.Client, network, way string) bool {
	return slices.ContainsFunc(append(r.none, "node/sctp/*", "stray/tcp/*", "stray/sctp/*", "stray/udp/node port*"), func(pattern string) bool {
		matches, err := path.Match(pattern, c.Name+"/"+network+"/"+way)

		return matches && err == nil
	})
}

// mustTellLimits restarts an agent with flags, and checks which of all limits its status has.
func mustTellLimits(t *testing.T, agent *sluice.Node, flags, want []string) {
	t.Helper()
	lab.Must(t, agent.Stop())
	agent.SetArgs(flags...)
	lab.Must(t, agent.Start(), agent.WaitSynced(t.Context()))
	lab.EventuallyIn(t, waitTimeout, "status tells what is not translated", func() error {
		out, err := agent.Run("status")
		for _, text := range allLimits {
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

// ways is a testbed with two Services of all protocols, which both families of both pods serve.
type ways struct {
	*testbed
	pods      []*lab.Pod
	web, near *corev1.Service // near has the traffic policies Local
	external  []string        // addresses of web, IPv4 and IPv6
	port      atomic.Uint32   // the last source port of an association
}

// way is what clients dial, IPv4 and IPv6, and which pods answer.
type way struct {
	name string
	at   []string
	from []*lab.Pod
}

func mustWays(t *testing.T) *ways {
	t.Helper()
	w := &ways{testbed: mustTestbed(t)}
	w.port.Store(4000)
	self := w.Lab.Nodes[0]
	w.setNode(t, self, self.PodCIDRs[0].Masked().String(), self.IPv4.String(), self.IPv6.String())
	w.pods = []*lab.Pod{w.Local()[0], w.Remote()[0]}
	for _, pod := range w.pods {
		for _, ip := range []netip.Addr{pod.IPv4, pod.IPv6} {
			go lab.MustSCTP(t, pod.Namespace, ip, scene.PodPort).Serve()
		}
	}
	v4, v6 := scene.VirtualIPs()
	w.external = []string{v4, v6}
	w.web = w.createWay(t, "web", scene.ExternalIPs(w.external...))
	w.near = w.createWay(t, "near", scene.ExternalLocal, scene.InternalLocal)

	return w
}

// createWay creates a Service of all protocols with a load balancer, which all pods serve.
func (w *ways) createWay(t *testing.T, name string, changes ...scene.Change) *corev1.Service {
	t.Helper()
	for _, family := range object.Families {
		slice := w.Slice(name, family, scene.ReadyAll(w.pods...)...)
		slice.Ports = append(slice.Ports, object.EndpointPort("sctp", corev1.ProtocolSCTP, scene.PodPort))
		w.PutSlice(t, slice)
	}
	w.CreateService(t, name, append(changes, scene.LoadBalancer, func(svc *corev1.Service) {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "sctp", Port: 80, Protocol: corev1.ProtocolSCTP})
	})...)
	v4, v6 := scene.VirtualIPs()
	w.SetLoadBalancer(t, name, corev1.LoadBalancerIngress{IP: v4}, corev1.LoadBalancerIngress{IP: v6})
	svc, err := w.Client.CoreV1().Services(w.Namespace).Get(t.Context(), name, metav1.GetOptions{})
	lab.Must(t, err)

	return svc
}

// of returns the ways of a client to both Services, by the port with this place.
func (w *ways) of(c *scene.Client, at int) []way {
	node, port := w.Lab.Nodes[0], w.web.Spec.Ports[at].NodePort
	ways := []way{
		{"external IP", []string{scene.At(w.external[0], 80), scene.At(w.external[1], 80)}, w.pods},
	}
	if c == w.Node {
		ways = append(ways, way{"localhost", []string{scene.At("127.0.0.1", port), scene.At("::1", port)}, w.pods})
	}
	for _, svc := range []*corev1.Service{w.web, w.near} {
		suffix, inside, outside := "", w.pods, w.pods
		if svc == w.near {
			suffix, inside = ", Local", w.pods[:1]
		}
		if svc == w.near && c == w.Outside { // from inside of the cluster, all endpoints serve addresses for the outside
			outside = w.pods[:1]
		}
		port, ips, balancer := svc.Spec.Ports[at].NodePort, svc.Spec.ClusterIPs, svc.Status.LoadBalancer.Ingress
		ways = append(ways,
			way{"ClusterIP" + suffix, []string{scene.At(ips[0], 80), scene.At(ips[1], 80)}, inside},
			way{"node port" + suffix, []string{scene.At(node.IPv4.String(), port), scene.At(node.IPv6.String(), port)}, outside},
			way{"load balancer" + suffix, []string{scene.At(balancer[0].IP, 80), scene.At(balancer[1].IP, 80)}, outside})
	}

	return ways
}

// play has a client dial all that there is by a protocol. It is answered if that is translated.
func (w *ways) play(t *testing.T, c *scene.Client, network string, row switchRow) {
	t.Helper()
	var unanswered []scene.Dial
	for _, way := range w.of(c, slices.Index([]string{"tcp", "udp", "sctp"}, network)) {
		none := row.leavesOut(c, network, way.name)
		for _, address := range way.at {
			dial := c.To(network, address)
			switch {
			case none:
				unanswered = append(unanswered, dial)
			case network == "sctp":
				lab.EventuallyIn(t, countsAge, dial.String()+" is answered", func() error { return w.peer(t, dial).associate(time.Second) })
			case row.one:
				if answer := dial.MustAsk(t); !slices.Contains(scene.Names(way.from...), answer.Name) {
					t.Errorf("%s: %s answers", dial, answer.Name)
				}
			default:
				scene.MustReach(t, dial, scene.Names(way.from...)...)
			}
			if network == "udp" && !none {
				lab.EventuallyIn(t, countsAge, "a datagram of "+c.Name+" to the "+way.name+" at "+address+" is answered", func() error {
					by, err := askUnconnected(c, address)
					if err == nil && !slices.Contains(scene.Names(way.from...), by) {
						err = fmt.Errorf("%s answers", by)
					}

					return err
				})
			}
		}
	}
	w.mustStayUnanswered(t, unanswered)
}

// unansweredTime is how long a client waits for an answer that must not come.
const unansweredTime = 200 * time.Millisecond

// mustStayUnanswered dials all at once.
func (w *ways) mustStayUnanswered(t *testing.T, dials []scene.Dial) {
	t.Helper()
	var all errgroup.Group
	for _, dial := range dials {
		ask := func() error {
			x := dial.Exchange()
			x.Timeout = unansweredTime
			_, err := dial.From.Exchange(x)

			return err
		}
		if dial.Network == "sctp" {
			peer := w.peer(t, dial)
			ask = func() error { return peer.associate(unansweredTime) }
		}
		all.Go(func() error {
			if ask() == nil {
				t.Errorf("%s is answered, although nothing translates it", dial)
			}

			return nil
		})
	}
	lab.Must(t, all.Wait())
}

// peer is an end of an association to be, with its server.
type peer struct {
	*lab.SCTPPeer
	server netip.AddrPort
}

// peer returns the client's end of an association. Each has a port of its own.
func (w *ways) peer(t *testing.T, dial scene.Dial) peer {
	t.Helper()
	c, server := dial.From, netip.MustParseAddrPort(dial.Address)
	ip := map[bool]netip.Addr{false: c.IPv4, true: c.IPv6}[server.Addr().Is6()]
	if !ip.IsValid() { // the node's
		ip = map[bool]netip.Addr{false: w.Lab.Nodes[0].IPv4, true: w.Lab.Nodes[0].IPv6}[server.Addr().Is6()]
	}

	return peer{lab.MustSCTP(t, c.Namespace, ip, uint16(w.port.Add(1))), server}
}

func (p peer) associate(timeout time.Duration) error {
	_, err := p.Associate(p.server, timeout)

	return err
}

// askUnconnected sends a datagram by a socket that names no peer, and returns which pod has answered. The
// answer must come from the address that it was sent to.
func askUnconnected(c *scene.Client, address string) (string, error) {
	network, own := "udp4", c.IPv4
	if netip.MustParseAddrPort(address).Addr().Is6() {
		network, own = "udp6", c.IPv6
	}
	socket, err := c.Socket(network)
	if err != nil {
		return "", err
	}
	defer socket.Close()
	if own.IsValid() && !c.AtSocket {
		if err := socket.Bind(scene.At(own.String(), 0)); err != nil {
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
