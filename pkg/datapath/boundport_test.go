package datapath

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Two sockets that are bound to one port cannot have connections to one backend, by whichever Services: to the kernel
// they would be the same. To another backend the second one may connect.
func TestPortOfTwoServices(t *testing.T) {
	w := newWorld(t)
	w.add(t, service{proto: "tcp", at: []string{"203.0.113.1:80"}, to: []string{w.v4(0)}})
	w.add(t, service{proto: "tcp", at: []string{"203.0.113.2:80"}, to: []string{w.v4(0)}})
	w.add(t, service{proto: "tcp", at: []string{"203.0.113.3:80"}, to: []string{w.v4(1)}})
	pod := w.pod(t)
	for _, dial := range []struct {
		vip  string
		want error
	}{
		{"203.0.113.1:80", nil},
		{"203.0.113.2:80", unix.EADDRNOTAVAIL},
		{"203.0.113.3:80", nil},
	} {
		s := mustSocket(t, pod, "tcp4")
		lab.Must(t, s.SetOption(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), s.Bind("10.244.1.2:700"))
		if err := s.Connect(dial.vip); dial.want == nil && err != nil || dial.want != nil && lab.Errno(err) != dial.want {
			t.Errorf("%s: %v, want %v", dial.vip, err, dial.want)
		}
	}
}
