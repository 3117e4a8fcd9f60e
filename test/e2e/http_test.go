package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// page is what an HTTP server answers.
type page struct {
	code   int
	header http.Header
	body   string
}

// asker is a client that can ask for a page.
type asker func(address, path string) (page, error)

const question = "GET %s HTTP/1.0\r\nHost: test\r\n\r\n"

// of asks from a process whose sockets the hooks see.
func of(from *scene.Client) asker {
	return func(address, path string) (page, error) {
		socket, err := from.Socket(networkOf(address))
		if err != nil {
			return page{}, err
		}
		defer socket.Close()
		if err := socket.SetTimeout(time.Second); err != nil {
			return page{}, err
		}
		if err := socket.Connect(address); err != nil {
			return page{}, err
		}
		if err := socket.Send(fmt.Sprintf(question, path)); err != nil {
			return page{}, err
		}
		var answer strings.Builder
		for {
			text, _, err := socket.Recv()
			if err != nil {
				return page{}, err
			}
			if text == "" {
				return readPage(strings.NewReader(answer.String()))
			}
			answer.WriteString(text)
		}
	}
}

func networkOf(address string) string {
	if strings.HasPrefix(address, "[") {
		return "tcp6"
	}

	return "tcp4"
}

// in asks from a namespace, past all hooks: as a client elsewhere does.
func in(ns *lab.Namespace) asker {
	return func(address, path string) (page, error) {
		conn, err := ns.Dial("tcp", address, time.Second)
		if err != nil {
			return page{}, err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(waitTimeout)); err != nil {
			return page{}, err
		}
		if _, err := fmt.Fprintf(conn, question, path); err != nil {
			return page{}, err
		}

		return readPage(conn)
	}
}

func readPage(from io.Reader) (page, error) {
	response, err := http.ReadResponse(bufio.NewReader(from), nil)
	if err != nil {
		return page{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)

	return page{response.StatusCode, response.Header, string(body)}, err
}

// mustAnswer waits until a page is as it should be: the code, and parts of the body.
func mustAnswer(t testing.TB, ask asker, address, path string, code int, parts ...string) page {
	t.Helper()
	for deadline := time.Now().Add(waitTimeout); ; time.Sleep(10 * time.Millisecond) {
		got, err := ask(address, path)
		right := err == nil && got.code == code
		for _, part := range parts {
			right = right && strings.Contains(got.body, part)
		}
		if right {
			return got
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s%s: after %v: %d %q, %v, want %d with %q", address, path, waitTimeout, got.code, got.body, err, code, parts)
		}
	}
}

// mustNotAnswer waits until no process listens.
func mustNotAnswer(t testing.TB, ask asker, address string) {
	t.Helper()
	lab.Eventually(t, "no process listens at "+address, func() bool {
		_, err := ask(address, "/")

		return err != nil && strings.Contains(err.Error(), "connection refused")
	})
}
