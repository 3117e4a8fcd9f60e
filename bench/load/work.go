package load

import (
	"fmt"
	"net/netip"
	"time"
)

// Kind is what a client does each time.
type Kind string

const (
	// Connect makes a TCP connection, exchanges a request and its response on it,
	// and closes it. Only the connect call is on the clock.
	Connect Kind = "connect"
	// Exchange exchanges a request and its response on a TCP connection that stays
	// open. Each client has one; it makes it anew after a failure.
	Exchange Kind = "exchange"
	// UDPConnected does so on a connected UDP socket of the client.
	UDPConnected Kind = "udp-connected"
	// UDPUnconnected does so on a UDP socket of the client that is not connected:
	// each datagram has its own destination.
	UDPUnconnected Kind = "udp-unconnected"
	// UDPNew does so on a new connected UDP socket each time, as a resolver asks.
	UDPNew Kind = "udp-new"
)

// Closing is how a connection that a client makes for one exchange ends.
type Closing string

const (
	// ClientCloses is the default: the client sends the first FIN, when it has its answer.
	ClientCloses Closing = ""
	// ServerCloses has the server send the first FIN, right after its answer. Its side
	// keeps the connection's last state (TIME_WAIT).
	ServerCloses Closing = "server"
	// ClientResets ends the connection with an RST of the client, when it has its answer.
	ClientResets Closing = "reset"
)

// Work is what a load generator does.
type Work struct {
	Kind Kind

	// Closing is used by [Connect] only.
	Closing Closing

	// Sources are addresses that [Connect] dials from in turn, of the targets' family and all
	// of the namespace's own. None: the kernel chooses.
	Sources []netip.Addr

	// Targets are taken in turn; client c begins at target c. A client that keeps
	// its connection keeps its first target.
	Targets []netip.AddrPort

	// Clients is how many there are, each a thread; 0: 1.
	Clients int

	// Rate is how many exchanges are due per second, all clients together, at even
	// distances; what is due while a client is busy is late, and its clock runs. 0:
	// a closed loop, each client as fast as it can.
	Rate int

	// Pause is how long a client of a closed loop waits between two exchanges.
	Pause time.Duration

	// WarmUp comes before Duration, and counts for nothing.
	WarmUp, Duration time.Duration

	// Request and Response are sizes in bytes; 0: 64 and 128.
	Request, Response int
}

const (
	defaultRequest, defaultResponse = 64, 128

	// A request goes in one packet, so that no algorithm of TCP holds a part back.
	maxRequest  = 1024
	maxResponse = 65000

	// The runtime looks at each a hundred times a second.
	maxClients = 256
)

// withDefaults fills in what was left at 0.
func (w Work) withDefaults() Work {
	if w.Clients == 0 {
		w.Clients = 1
	}
	if w.Request == 0 {
		w.Request = defaultRequest
	}
	if w.Response == 0 {
		w.Response = defaultResponse
	}

	return w
}

// Validate returns an error that describes what is wrong with the work.
func (w Work) Validate() error {
	w = w.withDefaults()
	switch w.Kind {
	case Connect, Exchange, UDPConnected, UDPUnconnected, UDPNew:
	default:
		return fmt.Errorf("work: unknown kind %q", w.Kind)
	}
	if len(w.Targets) == 0 {
		return fmt.Errorf("work: no targets")
	}
	for _, target := range w.Targets {
		if !target.IsValid() || target.Port() == 0 || target.Addr().Is4() != w.Targets[0].Addr().Is4() {
			return fmt.Errorf("work: target %v: want ports, and addresses of one family", target)
		}
	}
	if w.Kind != Connect && (w.Closing != ClientCloses || len(w.Sources) > 0) {
		return fmt.Errorf("work: closing %q, %d sources: only for %s", w.Closing, len(w.Sources), Connect)
	}
	switch w.Closing {
	case ClientCloses, ServerCloses, ClientResets:
	default:
		return fmt.Errorf("work: unknown closing %q", w.Closing)
	}
	for _, source := range w.Sources {
		if source.Is4() != w.Targets[0].Addr().Is4() {
			return fmt.Errorf("work: source %v: want the targets' family", source)
		}
	}
	if w.Clients < 1 || w.Clients > maxClients {
		return fmt.Errorf("work: %d clients: want 1 to %d", w.Clients, maxClients)
	}
	if w.Rate < 0 || w.Pause < 0 || w.WarmUp < 0 || w.Duration <= 0 {
		return fmt.Errorf("work: rate %d, pause %v, warm-up %v, duration %v: want none negative, and a duration",
			w.Rate, w.Pause, w.WarmUp, w.Duration)
	}
	if w.Rate > 0 && w.Pause > 0 {
		return fmt.Errorf("work: a rate and a pause")
	}
	if w.Request < headerSize || w.Request > maxRequest {
		return fmt.Errorf("work: request of %d bytes: want %d to %d", w.Request, headerSize, maxRequest)
	}
	if w.Response < headerSize || w.Response > maxResponse {
		return fmt.Errorf("work: response of %d bytes: want %d to %d", w.Response, headerSize, maxResponse)
	}

	return nil
}
