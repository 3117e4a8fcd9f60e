package lab

import (
	"errors"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// call is what a [Caller] asks of its process: one line of JSON. Calls run side
// by side; answers come in the order in which they are ready.
type call struct {
	ID      uint64
	Act     act
	Socket  int           `json:",omitempty"`
	Network string        `json:",omitempty"`
	Address string        `json:",omitempty"`
	Bytes   []byte        `json:",omitempty"`
	Level   int           `json:",omitempty"` // of an option
	Option  int           `json:",omitempty"`
	Value   int           `json:",omitempty"`
	Timeout time.Duration `json:",omitempty"`

	Exchange *Exchange `json:",omitempty"`
	Load     *Load     `json:",omitempty"`
}

// act is the kind of a call.
type act string

const (
	actSocket     act = "socket"
	actBind       act = "bind"
	actConnect    act = "connect"
	actDisconnect act = "disconnect"
	actListen     act = "listen"
	actAccept     act = "accept"
	actSend       act = "send"
	actRecv       act = "recv"
	actPeer       act = "getpeername"
	actLocal      act = "getsockname"
	actSetOption  act = "setsockopt"
	actOption     act = "getsockopt"
	actCookie     act = "cookie"
	actTimeout    act = "timeout"
	actClose      act = "close"
	actExchange   act = "exchange"
	actStartLoad  act = "start load"
	actAwaitLoad  act = "await load"
	actStopLoad   act = "stop load"
	actCgroup     act = "cgroup"
)

// answer is the result of a call.
type answer struct {
	ID      uint64
	Failure *failure       `json:",omitempty"`
	Socket  int            `json:",omitempty"`
	Address netip.AddrPort `json:",omitzero"`
	Bytes   []byte         `json:",omitempty"`
	Value   uint64         `json:",omitempty"`

	Reply  *Reply      `json:",omitempty"`
	Report *LoadReport `json:",omitempty"`
}

// failure is an error on its way through JSON. A system call's error keeps its
// number.
type failure struct {
	Call  string     `json:",omitempty"`
	Errno unix.Errno `json:",omitempty"`
	Text  string     `json:",omitempty"`
}

func failureOf(err error) *failure {
	var syscallError *os.SyscallError
	errno, isErrno := unix.Errno(0), false
	if errors.As(err, &syscallError) {
		errno, isErrno = syscallError.Err.(unix.Errno)
	}
	switch {
	case err == nil:
		return nil
	case isErrno:
		return &failure{Call: syscallError.Syscall, Errno: errno}
	default:
		return &failure{Text: err.Error()}
	}
}

func (f *failure) err() error {
	switch {
	case f == nil:
		return nil
	case f.Errno != 0:
		return os.NewSyscallError(f.Call, f.Errno)
	default:
		return errors.New(f.Text)
	}
}

// Errno returns the number of a system call's error: 0 for nil, and -1, which is
// no errno, for an error that no system call made.
func Errno(err error) unix.Errno {
	var errno unix.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno):
		return errno
	default:
		return ^unix.Errno(0)
	}
}
