package datapath

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/test/lab"
)

// bypassed returns what packets miss that our program at ingress turns around, and what they miss in the stack.
func (p *port) bypassed() (atIngress, inStack string) {
	p.t.Helper()
	var found map[int]string
	lab.MustDo(p.t, p.node, func() (err error) {
		found, err = Bypassed([]int{p.index, 99999})

		return err
	})

	return found[p.index], found[0]
}

// What runs at ingress behind ours misses packets that ours turns around; what runs before it, or at egress, does
// not.
func TestBypassed(t *testing.T) {
	eachAttachment(t, func(t *testing.T, by Attachment) {
		p := newPort(t, by)
		want := func(when, want string) {
			t.Helper()
			if got, _ := p.bypassed(); got != want {
				t.Errorf("%s: %q, want %q", when, got, want)
			}
		}
		want("without programs", "")
		p.attach(p.device())
		want("with ours", "")
		ingress, egress := deviceHooks()[1], deviceHooks()[0]
		undo := p.attachTheir(egress, newCounter(t, -1), link.Head(), 1)
		want("with theirs at egress", "")
		undo()
		undo = p.attachTheir(ingress, newCounter(t, -1), link.Head(), 1)
		want("with theirs ahead", "")
		undo()
		undo = p.attachTheir(ingress, newCounter(t, -1), link.Tail(), 100)
		want("with theirs behind", p.theirName())
		p.attach()
		want("with theirs alone", p.theirName())
		undo()
		want("without theirs", "")
	})
}

// A program at a hook of netfilter misses packets that leave before.
func TestBypassedInNetfilter(t *testing.T) {
	p := newPort(t, Clsact)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "their_firewall", Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}, // NF_ACCEPT
	})
	if err != nil {
		t.Skip("this kernel has no programs of netfilter (Linux 6.4): ", err)
	}
	defer program.Close()
	for _, test := range []struct {
		hook link.NetfilterInetHook
		want string
	}{{link.NetfilterInetLocalIn, ""}, {link.NetfilterInetForward, "their_firewall"}} {
		// For as short a time as possible: agents of the whole machine take it for theirs.
		var at link.Link
		lab.MustDo(t, p.node, func() (err error) {
			at, err = link.AttachNetfilter(link.NetfilterOptions{
				Program: program, ProtocolFamily: link.NetfilterProtoIPv4, Hook: test.hook, Priority: 7,
			})

			return err
		})
		_, got := p.bypassed()
		lab.Must(t, at.Close())
		if got != test.want {
			t.Errorf("at hook %v: %q, want %q", test.hook, got, test.want)
		}
	}
}

// Links come and go all the time, also while they are listed.
func TestBypassedWhileLinksAreCreated(t *testing.T) {
	p := newPort(t, TCX)
	begin := time.Now()
	var creators sync.WaitGroup
	defer creators.Wait()
	for range 4 {
		other := newCounter(t, -1)
		creators.Go(func() {
			for time.Since(begin) < time.Second {
				err := p.node.Do(func() error {
					l, err := link.AttachTCX(link.TCXOptions{Interface: p.index, Program: other.program, Attach: ebpf.AttachTCXEgress})
					if err != nil {
						return err
					}

					return errors.Join(l.Detach(), l.Close()) // a link that is only closed is detached some time later
				})
				if err != nil {
					t.Error(err)

					return
				}
			}
		})
	}
	for time.Since(begin) < time.Second {
		if atIngress, inStack := p.bypassed(); atIngress != "" || inStack != "" {
			t.Fatalf("%q at ingress, %q in the stack", atIngress, inStack)
		}
	}
}
