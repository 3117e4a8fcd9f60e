package scene

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// Connection is a TCP connection that a client keeps open, or a connected UDP socket.
type Connection struct {
	Dial
	Socket *lab.Socket
	Pod    string // that answered first
}

// Open connects. The caller closes the socket.
func (d Dial) Open() (*Connection, error) {
	family := "4"
	if netip.MustParseAddrPort(d.Address).Addr().Is6() {
		family = "6"
	}
	socket, err := d.From.Socket(d.Network + family)
	if err != nil {
		return nil, err
	}
	err = socket.SetTimeout(lab.Timeout / 4)
	if from := d.bind(); err == nil && from != "" {
		err = socket.Bind(from)
	}
	if err == nil {
		err = socket.Connect(d.Address)
	}
	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}

	return &Connection{Dial: d, Socket: socket}, nil
}

// MustOpen connects, and waits for a first answer.
func (d Dial) MustOpen(t testing.TB) *Connection {
	t.Helper()
	c, err := d.Open()
	if err != nil {
		t.Fatalf("%s: %v", d, err)
	}
	answer, err := c.Ask()
	if err != nil {
		t.Fatalf("%s: %v", d, err)
	}
	c.Pod = answer.Name

	return c
}

// MustOpenAll connects each client by each network to an address.
func MustOpenAll(t testing.TB, clients []*Client, address string, networks ...string) []*Connection {
	t.Helper()
	var all []*Connection
	for _, c := range clients {
		for _, network := range networks {
			all = append(all, c.To(network, address).MustOpen(t))
		}
	}

	return all
}

// Ask asks on the connection.
func (c *Connection) Ask() (lab.Answer, error) {
	if err := c.Socket.Send("who\n"); err != nil {
		return lab.Answer{}, err
	}
	text, _, err := c.Socket.Recv()
	if err != nil {
		return lab.Answer{}, err
	}

	return lab.ParseAnswer(text)
}

// MustGoOn fails the test unless the pod that answered first still answers on each
// connection.
func MustGoOn(t testing.TB, connections ...*Connection) {
	t.Helper()
	for _, c := range connections {
		answer, err := c.Ask()
		if err != nil || answer.Name != c.Pod {
			t.Errorf("%s, which is open: %q answers, %v, want %s", c.Dial, answer.Name, err, c.Pod)
		}
	}
}

// MustClose ends connections.
func MustClose(t testing.TB, connections ...*Connection) {
	t.Helper()
	for _, c := range connections {
		lab.Must(t, c.Socket.Close())
	}
}
