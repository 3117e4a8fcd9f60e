package lab

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Answer is the answer of a [Server]: its name and the client as it saw it, as in
// "pod-1 10.244.1.2:8080 saw 10.244.1.1:43210". Addresses are unmapped.
type Answer struct {
	Name   string
	Local  netip.AddrPort // where the question arrived
	Client netip.AddrPort // where it came from
}

func (a Answer) String() string {
	return fmt.Sprintf("%s %s saw %s", a.Name, a.Local, a.Client)
}

// ParseAnswer reads an answer, padded or not.
func ParseAnswer(text string) (Answer, error) {
	fields := strings.Fields(text)
	if len(fields) != 4 || fields[2] != "saw" {
		return Answer{}, fmt.Errorf("not a server's answer: %.80q", text)
	}
	local, err := netip.ParseAddrPort(fields[1])
	if err != nil {
		return Answer{}, fmt.Errorf("answer: %w", err)
	}
	client, err := netip.ParseAddrPort(fields[3])
	if err != nil {
		return Answer{}, fmt.Errorf("answer: %w", err)
	}

	return Answer{Name: fields[0], Local: local, Client: client}, nil
}

// answerTo answers a question, which may ask for a long answer, or for a late one:
// then it waits, unless the server stops. More is false if the connection is to
// be closed after the answer.
func (a Answer) answerTo(question string, stopped <-chan struct{}) (line []byte, more bool) {
	word, argument, _ := strings.Cut(strings.TrimSpace(question), " ")
	text := a.String()
	switch word {
	case "size":
		if size, err := strconv.Atoi(argument); err == nil && size > len(text)+1 {
			text += strings.Repeat(" ", size-len(text)-1)
		}
	case "wait":
		if pause, err := time.ParseDuration(argument); err == nil {
			select {
			case <-time.After(pause):
			case <-stopped:
			}
		}
	}

	return []byte(text + "\n"), word != "bye"
}
