package scene

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// Client is a process that dials.
type Client struct {
	*lab.Caller
	Name      string
	Namespace *lab.Namespace
	// AtSocket is true if socket hooks see it. They refuse with other errors than
	// device hooks, which send packets.
	AtSocket bool
	// IPv4 and IPv6 are what it binds to; the zero value is nothing.
	IPv4, IPv6 netip.Addr
}

// MustClientIn starts a client in a namespace. Socket hooks see it if it has a cgroup.
func MustClientIn(t testing.TB, name string, ns *lab.Namespace, cgroup *lab.Cgroup) *Client {
	t.Helper()

	return &Client{Caller: lab.MustCaller(t, ns, cgroup), Name: name, Namespace: ns, AtSocket: cgroup != nil}
}

// Dial is a client with what it dials.
type Dial struct {
	From    *Client
	Network string // tcp or udp
	Address string
}

// To returns a dial of the client to an address.
func (c *Client) To(network, address string) Dial {
	return Dial{From: c, Network: network, Address: address}
}

// Dials returns a dial to the address from each of the clients.
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
		return "" // clients in pods do not bind to their addresses
	}

	return netip.AddrPortFrom(source, 0).String()
}

// Exchange returns the dial as an exchange, for loads and for tests that change its fields.
func (d Dial) Exchange() lab.Exchange {
	return lab.Exchange{Network: d.Network, Address: d.Address, From: d.bind(), Timeout: lab.Timeout / 4}
}

// Ask returns the answer. Its timeout allows for a second SYN: the kernel overlooks the
// refusal of the first one if it arrives before connect(2) has released the socket.
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

// MustAsk is Ask with the timeout of Exchange. It fails the test without an answer.
func (d Dial) MustAsk(t testing.TB) lab.Answer {
	t.Helper()
	answer, err := d.ask(d.Exchange())
	if err != nil {
		t.Fatalf("%s: %v", d, err)
	}

	return answer
}

// At returns an address with a port, as clients dial it.
func At(address string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port)).String()
}
