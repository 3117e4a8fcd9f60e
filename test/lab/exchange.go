package lab

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Exchange is one question to a [Server] and its answer, on a socket of its own.
type Exchange struct {
	Network string // tcp4, tcp6, udp4, udp6; tcp and udp take the address' family
	Address string // what to dial; a v4-mapped address needs tcp6 or udp6

	From        string        `json:",omitempty"` // what to bind to; "" binds to nothing
	Question    string        `json:",omitempty"` // "" asks "who"; see [Server] for others
	Unconnected bool          `json:",omitempty"` // UDP: sendto and recvfrom, no connect
	Timeout     time.Duration `json:",omitempty"` // of each step; 0 means 2 s
	Mark        int           `json:",omitempty"` // SO_MARK
}

// Reply is the result of an [Exchange]. After an error it has what came before it.
type Reply struct {
	Text    string         // the answer, without its line end
	Peer    netip.AddrPort `json:",omitzero"` // getpeername, after connect
	Local   netip.AddrPort `json:",omitzero"` // getsockname, at the end
	From    netip.AddrPort `json:",omitzero"` // the sender of the answer, by recvfrom; UDP only
	Connect time.Duration  // until connected
	Latency time.Duration  // until answered, or failed
}

// run does the exchange. A stream that ends before its answer does is ENODATA.
func (x *Exchange) run() (reply Reply, err error) {
	start := time.Now()
	defer func() { reply.Latency = time.Since(start) }()

	conn, err := x.open(&reply)
	if conn != nil {
		defer func() { err = errors.Join(err, conn.close()) }()
	}
	if err != nil {
		return reply, err
	}
	reply.Connect = time.Since(start)

	return reply, x.ask(conn, &reply)
}

// open returns a socket that is ready to be asked. It is the caller's to close
// also after an error, unless it is nil.
func (x *Exchange) open(reply *Reply) (*rawSocket, error) {
	domain, kind, err := socketKind(x.Network, x.Address)
	if err != nil {
		return nil, err
	}
	conn, err := newRawSocket(domain, kind, x.Timeout)
	if err != nil {
		return nil, err
	}
	if x.Mark != 0 {
		if err := conn.setOption(unix.SOL_SOCKET, unix.SO_MARK, x.Mark); err != nil {
			return conn, err
		}
	}
	if x.From != "" {
		if err := conn.bind(x.From); err != nil {
			return conn, err
		}
	}
	if x.Unconnected {
		return conn, nil
	}
	if err := conn.connect(x.Address); err != nil {
		return conn, err
	}
	reply.Peer, err = conn.peer()

	return conn, err
}

// ask sends the question and receives the answer.
func (x *Exchange) ask(conn *rawSocket, reply *Reply) (err error) {
	to := ""
	if x.Unconnected {
		to = x.Address
	}
	if err := conn.send([]byte(x.question()), to); err != nil {
		return err
	}
	text, from, err := receiveLine(conn)
	reply.Text = string(bytes.TrimSuffix(text, []byte("\n")))
	reply.From = from
	if err != nil {
		return err
	}
	reply.Local, err = conn.local()

	return err
}

func (x *Exchange) question() string {
	if x.Question == "" {
		return "who\n"
	}

	return x.Question + "\n"
}

// receiveLine receives until a line end: a stream may deliver an answer in
// parts, a datagram is one.
func receiveLine(conn *rawSocket) (line []byte, from netip.AddrPort, err error) {
	buffer := make([]byte, maxDatagram)
	for {
		size, sender, err := conn.recv(buffer)
		if err != nil {
			return line, from, err
		}
		if size == 0 {
			return line, from, os.NewSyscallError("recvfrom", unix.ENODATA)
		}
		line, from = append(line, buffer[:size]...), sender
		if line[len(line)-1] == '\n' {
			return line, from, nil
		}
	}
}
