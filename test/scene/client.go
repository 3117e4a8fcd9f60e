package scene

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// Client is a program that dials.
type Client struct {
	*lab.Caller
	Name      string
	Namespace *lab.Namespace
	// AtSocket says that socket hooks see it. They say no in other words than
	// device hooks, which send packets.
	AtSocket bool
	// IPv4 and IPv6 are what it binds to; the zero value is nothing.
	IPv4, IPv6 netip.Addr
}

func mustClientIn(t testing.TB, name string, ns *lab.Namespace, cgroup *lab.Cgroup) *Client {
	t.Helper()

	return &Client{Caller: lab.MustCaller(t, ns, cgroup), Name: name, Namespace: ns, AtSocket: cgroup != nil}
}

// Dial is a client with what it dials.
type Dial struct {
	From    *Client
	Network string // tcp or udp
	Address string
}

// To returns what is dialled by a client.
func (c *Client) To(network, address string) Dial {
	return Dial{From: c, Network: network, Address: address}
}

// Dials is what all of some clients dial.
func Dials(clients []*Client, network, address string) []Dial {
	var all []Dial
	for _, c := range clients {
		all = append(all, c.To(network, address))
	}

	return all
}

func (d Dial) String() string { return fmt.Sprintf("%s to %s %s", d.From.Name, d.Network, d.Address) }

// bind is what the client binds to: "" is nothing.
func (d Dial) bind() string {
	source := d.From.IPv4
	if netip.MustParseAddrPort(d.Address).Addr().Is6() {
		source = d.From.IPv6
	}
	if !source.IsValid() || d.From.AtSocket {
		return "" // nobody who is in a pod binds to its address
	}

	return netip.AddrPortFrom(source, 0).String()
}

// Exchange is the dial, for loads and with all that one may want to say of it.
func (d Dial) Exchange() lab.Exchange {
	return lab.Exchange{Network: d.Network, Address: d.Address, From: d.bind(), Timeout: Patience / 4}
}

// Ask returns what is answered within a while, which is long enough for a second
// SYN: that the first is refused, the kernel overlooks if it happens at once.
func (d Dial) Ask() (lab.Answer, error) {
	x := d.Exchange()
	x.Timeout = 1500 * time.Millisecond

	return d.ask(x)
}

func (d Dial) ask(x lab.Exchange) (lab.Answer, error) {
	reply, err := d.From.Exchange(x)
	if err != nil {
		return lab.Answer{}, err
	}

	return lab.ParseAnswer(reply.Text)
}

// MustAsk returns who answers.
func (d Dial) MustAsk(t testing.TB) lab.Answer {
	t.Helper()
	answer, err := d.ask(d.Exchange())
	if err != nil {
		t.Fatalf("%s: %v", d, err)
	}

	return answer
}

// At is an address with a port, as clients dial it.
func At(address string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port)).String()
}
