package load

import (
	"bytes"
	"unsafe"

	"golang.org/x/sys/unix"
)

// exchanges are what a client of each kind does.
var exchanges = map[Kind]func(*client, *sockaddr) (clock, fault){
	Connect:        (*client).exchangeOnNewConnection,
	Exchange:       (*client).exchangeOnOpenConnection,
	UDPConnected:   (*client).exchangeOnOpenSocket,
	UDPUnconnected: (*client).exchangeUnconnected,
	UDPNew:         (*client).exchangeOnNewSocket,
}

// exchangeOnNewConnection connects, sends the request, and ends the connection as [Work.Closing] demands. By
// default it closes in an orderly way, first: what follows is a FIN, and the connection's
// last state is kept on this side.
func (c *client) exchangeOnNewConnection(target *sockaddr) (t clock, f fault) {
	fd, f := c.open(target, unix.SOCK_STREAM)
	if f.call != "" {
		return t, f
	}
	defer closeSocket(fd)
	if f := c.bind(fd); f.call != "" {
		return t, f
	}
	t.from = now()
	errno := connectSocket(fd, target)
	t.to = now()
	if errno != 0 {
		return t, fault{"connect", errno}
	}
	if f := c.ask(fd); f.call != "" {
		return t, f
	}
	switch c.work.Closing {
	case ServerCloses:
		n, errno := receive(fd, c.answer, nil)
		if errno == 0 && n > 0 {
			errno = unix.EBADMSG
		}
		if errno != 0 {
			return t, fault{"receive the end from", errno}
		}
	case ClientResets:
		linger := unix.Linger{Onoff: 1}
		if errno := setOption(fd, unix.SOL_SOCKET, unix.SO_LINGER, unsafe.Pointer(&linger), unsafe.Sizeof(linger)); errno != 0 {
			return t, fault{"set linger for", errno}
		}
	}

	return t, fault{}
}

// bind gives a socket the next of the sources, if there are any. Its port is chosen when it
// connects: by then the kernel knows which ports the target has.
func (c *client) bind(fd int) fault {
	if len(c.sources) == 0 {
		return fault{}
	}
	source := &c.sources[(c.number+int(c.sent))%len(c.sources)]
	one := int32(1)
	errno := setOption(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, unsafe.Pointer(&one), unsafe.Sizeof(one))
	if errno == 0 {
		errno = bindSocket(fd, source)
	}
	if errno != 0 {
		return fault{"bind for", errno}
	}

	return fault{}
}

func (c *client) exchangeOnOpenConnection(*sockaddr) (t clock, f fault) {
	if f := c.keep(unix.SOCK_STREAM); f.call != "" {
		return t, f
	}
	t.from = now()
	f = c.ask(c.kept)
	t.to = now()
	c.keepUnless(f)

	return t, f
}

func (c *client) exchangeOnOpenSocket(*sockaddr) (t clock, f fault) {
	if f := c.keep(unix.SOCK_DGRAM); f.call != "" {
		return t, f
	}
	t.from = now()
	f = c.askByDatagram(c.kept, nil)
	t.to = now()
	c.keepUnless(f)

	return t, f
}

func (c *client) exchangeUnconnected(target *sockaddr) (t clock, f fault) {
	if c.kept < 0 {
		if c.kept, f = c.open(target, unix.SOCK_DGRAM); f.call != "" {
			return t, f
		}
	}
	t.from = now()
	f = c.askByDatagram(c.kept, target)
	t.to = now()
	c.keepUnless(f)

	return t, f
}

func (c *client) exchangeOnNewSocket(target *sockaddr) (t clock, f fault) {
	t.from = now()
	fd, f := c.open(target, unix.SOCK_DGRAM)
	if f.call != "" {
		return t, f
	}
	if errno := connectSocket(fd, target); errno != 0 {
		f = fault{"connect", errno}
	} else {
		f = c.askByDatagram(fd, nil)
	}
	closeSocket(fd)
	t.to = now()

	return t, f
}

// open returns a socket that does not wait for ever, or -1.
func (c *client) open(target *sockaddr, kind int) (int, fault) {
	fd, errno := openSocket(target.family, kind)
	if errno != 0 {
		return -1, fault{"socket for", errno}
	}
	if errno := setTimeouts(fd, &c.timeout); errno != 0 {
		closeSocket(fd)

		return -1, fault{"set time-out for", errno}
	}

	return fd, fault{}
}

// keep sees to it that the client has its socket, connected to its first target.
func (c *client) keep(kind int) (f fault) {
	if c.kept >= 0 {
		return fault{}
	}
	target := &c.targets[c.number%len(c.targets)]
	fd, f := c.open(target, kind)
	if f.call != "" {
		return f
	}
	if errno := connectSocket(fd, target); errno != 0 {
		closeSocket(fd)

		return fault{"connect", errno}
	}
	one := int32(1)
	if kind == unix.SOCK_STREAM {
		setOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, unsafe.Pointer(&one), unsafe.Sizeof(one))
	}
	c.kept = fd

	return fault{}
}

// keepUnless closes the client's socket after a fault: an answer that is late must
// not be that to another request.
func (c *client) keepUnless(f fault) {
	if f.call != "" && c.kept >= 0 {
		closeSocket(c.kept)
		c.kept = -1
	}
}

// ask exchanges a request and its response on a connection.
func (c *client) ask(fd int) fault {
	c.countRequest()
	if errno := send(fd, c.request, nil); errno != 0 {
		return fault{"send to", errno}
	}
	if errno := receiveAll(fd, c.answer); errno != 0 {
		return fault{"receive from", errno}
	}

	return c.check()
}

// askByDatagram exchanges two datagrams, with where the socket is connected to or,
// if it is not nil, with another address, from which the answer must come, too.
func (c *client) askByDatagram(fd int, to *sockaddr) fault {
	c.countRequest()
	if errno := send(fd, c.request, to); errno != 0 {
		return fault{"send to", errno}
	}
	var from *sockaddr
	if to != nil {
		from = &c.source
	}
	n, errno := receive(fd, c.answer, from)
	switch {
	case errno != 0:
		return fault{"receive from", errno}
	case n != len(c.answer):
		return fault{"answer of", unix.EBADMSG}
	case to != nil && !from.is(to):
		return fault{"answer of", unix.EREMCHG}
	}

	return c.check()
}

// countRequest gives the request its number.
func (c *client) countRequest() {
	c.sent++
	setNumber(c.request, c.sent)
}

// check returns a fault unless the answer is that to the last request.
func (c *client) check() fault {
	if !bytes.Equal(c.answer[:headerSize], c.request[:headerSize]) {
		return fault{"answer of", unix.EBADMSG}
	}

	return fault{}
}
