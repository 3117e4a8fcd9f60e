package ui

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/pkg/remote"
	"github.com/sluice-lb/sluice/test/lab"
)

// mustServe runs a server with a picture until the test ends.
func mustServe(t *testing.T, collect func(context.Context) (Picture, error)) *Server {
	t.Helper()
	s, err := Listen(0, collect)
	lab.Must(t, err)
	lab.MustRun(t, s.Run)

	return s
}

func get(t *testing.T, url, host string) (int, string, http.Header) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	lab.Must(t, err)
	request.Host = host
	request.Header.Set("Origin", "http://other.example")
	response, err := http.DefaultClient.Do(request)
	lab.Must(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	lab.Must(t, err)

	return response.StatusCode, string(text), response.Header
}

func TestServer(t *testing.T) {
	s := mustServe(t, func(context.Context) (Picture, error) { return Picture{Nodes: []Node{{Name: "node-1"}}}, nil })
	if !strings.HasPrefix(s.URL(), "http://127.0.0.1:") {
		t.Errorf("the page is at %s, want 127.0.0.1", s.URL())
	}
	pictureURL := strings.Replace(s.URL(), "/?", "/picture?", 1)
	bare, _, _ := strings.Cut(s.URL(), "?")
	for _, test := range []struct {
		name, url, host string
		code            int
		text            string
	}{
		{"the page", s.URL(), "", 200, "<title>Sluice</title>"},
		{"the picture", pictureURL, "", 200, `"node-1"`},
		{"without the token", bare, "", 403, "has a token"},
		{"the picture without the token", bare + "picture", "", 403, "has a token"},
		{"with another token", bare + "?token=x", "", 403, "has a token"},
		{"by another name, as pages of other sites could have it", pictureURL, "other.example", 403, "has a token"},
		{"another path", strings.Replace(s.URL(), "/?", "/etc/passwd?", 1), "", 404, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			code, text, header := get(t, test.url, test.host)
			if code != test.code || !strings.Contains(text, test.text) {
				t.Errorf("it is %d %s, want %d %s", code, text, test.code, test.text)
			}
			if allowed := header.Get("Access-Control-Allow-Origin"); allowed != "" {
				t.Errorf("other sites may read it: %s", allowed)
			}
		})
	}
}

// What keeps the nodes from being asked is on the page, and pictures are made one at a time.
func TestPictureFails(t *testing.T) {
	at := make(chan bool, 1)
	s := mustServe(t, func(context.Context) (Picture, error) {
		select {
		case at <- true:
		default:
			t.Error("two pictures are made at the same time")
		}
		time.Sleep(20 * time.Millisecond)
		<-at

		return Picture{}, errors.New("no such context")
	})
	url := strings.Replace(s.URL(), "/?", "/picture?", 1)
	done := make(chan bool)
	for range 3 {
		go func() {
			if code, text, _ := get(t, url, ""); code != 502 || !strings.Contains(text, "no such context") {
				t.Errorf("it is %d %s", code, text)
			}
			done <- true
		}()
	}
	for range 3 {
		<-done
	}
}

func TestCompose(t *testing.T) {
	const well = `{"running":true,"synced":true,"counts":{"sent to a backend":9,"refused: no endpoint":2,"dropped: not in the ranges":1}}`
	const services = `[{"name":"shop/web","ports":[{"name":"shop/web:http","protocol":"TCP",
			"frontends":[{"address":"10.96.0.1:80","protocol":"TCP","scope":"internal","kind":"ClusterIP"}],
			"backends":[{"address":"10.244.1.2:8080","protocol":"TCP","node":"a","active":true,"connections":2},
				{"address":"10.244.2.2:8080","protocol":"TCP","node":"b","active":false,"reason":"not ready","connections":0},
				{"address":"10.244.3.2:8080","protocol":"TCP","node":"c","active":false,"reason":"other node (traffic policy Local)","connections":0}]}]},
			{"name":"shop/db","ports":[]}]`
	live := func(connections string) string {
		return `{"services":[{"service":"shop/web","newPerSecond":1,"backends":[{"backend":"10.244.1.2:8080","protocol":"TCP","live":` + connections + `},
			{"backend":"10.244.9.9:8080","protocol":"TCP","live":7}]}]}`
	}
	nothing, failed := remote.Answer{Node: "b", Out: "[]"}, remote.Answer{Node: "d", Code: 1, Errors: "sluice: no such flag"}
	down := remote.Answer{Node: "c", Code: 2, Err: errors.New("refused")}
	got := compose(time.Time{}, []remote.Answer{{Node: "a", Out: services}}, map[string][]remote.Answer{
		"status": {{Node: "a", Out: well}, {Node: "b", Out: `{"running":false,"errors":[{"service":"shop/db","error":"no room"}]}`, Code: 1}, down, {Node: "d", Out: well}},
		"flows": {
			{Node: "a", Out: `[{"service":"shop/web:http","protocol":"TCP","client":"192.0.2.1:99","originalDst":"10.96.0.1:80","backend":"10.244.1.2:8080"}]`},
			{Node: "b", Out: `[{"service":"shop/db:","protocol":"TCP","client":"10.244.1.2:99","originalDst":"10.96.0.1:80","backend":"10.244.1.2:8080"}]`}, down, {Node: "d", Out: `[{"service":"id 7","client":"192.0.2.1:99"}]`},
		},
		"connections": {
			{Node: "a", Out: `[{"service":"shop/web:http","client":"10.244.1.9:1","pod":"shop/cart"},{"service":"shop/web:http","client":"10.244.1.9:2","pod":"shop/cart"},
				{"service":"shop/web:http","client":"192.168.1.1:2","process":{"command":"curl","pid":1}}]`}, nothing, down, nothing,
		},
		"top": {
			{Node: "a", Out: `{"services":[{"service":"shop/web","newPerSecond":1.5,"refusedPerSecond":{"reject_no_backend":2},"backends":[{"backend":"10.244.1.2:8080","protocol":"TCP","live":2}]}]}`}, {Node: "b", Out: live("3")}, down, failed,
		},
	})
	want := `{
  "time": "0001-01-01T00:00:00Z",
  "nodes": [
    {"name": "a"},
    {"name": "b", "problem": "not well: see kubectl sluice status --node b"},
    {"name": "c", "problem": "no answer: refused"},
    {"name": "d", "problem": "top: sluice: no such flag"}
  ],
  "restMilliseconds": 0,
  "services": [
    {"name": "shop/db", "addresses": [], "error": "no room", "backends": [], "callers": [{"name": "shop/web (10.244.1.2)", "connections": 1}]},
    {
      "name": "shop/web", "addresses": ["10.96.0.1:80/TCP"],
      "backends": [
        {"address": "10.244.1.2:8080/TCP", "node": "a", "active": true, "connections": 5},
        {"address": "10.244.2.2:8080/TCP", "node": "b", "active": false, "reason": "not ready", "connections": 0},
        {"address": "10.244.3.2:8080/TCP", "node": "c", "active": true, "connections": 0}
      ],
      "callers": [{"name": "shop/cart", "connections": 2}, {"name": "192.0.2.1", "connections": 1}, {"name": "curl on a", "connections": 1}],
      "newPerSecond": 2.5, "refusedPerSecond": {"reject_no_backend": 2}
    }
  ],
  "refused": {"refused: no endpoint": 4, "dropped: not in the ranges": 2}
}`
	text, err := json.Marshal(got)
	lab.Must(t, err)
	var have, wanted any
	lab.Must(t, json.Unmarshal(text, &have), json.Unmarshal([]byte(want), &wanted))
	if diff := cmp.Diff(wanted, have); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// After a picture that took long, nodes are left alone for five times as long, however many browsers ask: one that has no
// picture gets the last one at once, and one that has it waits for the next.
func TestPicturesRest(t *testing.T) {
	const took = 50 * time.Millisecond
	var ended time.Time
	collected := 0
	s := mustServe(t, func(context.Context) (Picture, error) {
		if rest := time.Since(ended); rest < 5*took {
			t.Errorf("a picture is collected %v after the last one", rest)
		}
		time.Sleep(took)
		ended = time.Now()
		collected++

		return Picture{Time: time.Date(2026, 1, collected, 0, 0, 0, 5, time.UTC)}, nil
	})
	url := strings.Replace(s.URL(), "/?", "/picture?", 1)
	for i, test := range []struct{ after, want string }{
		{"", "2026-01-01T00:00:00.000000005Z"},
		{"", "2026-01-01T00:00:00.000000005Z"},
		{"&after=2026-01-01T00:00:00.000000005Z", "2026-01-02T00:00:00.000000005Z"},
		{"&after=2026-01-01T00:00:00.000000005Z", "2026-01-02T00:00:00.000000005Z"},
	} {
		if _, text, _ := get(t, url+test.after, ""); !strings.Contains(text, test.want) {
			t.Errorf("picture %d is %s, want that of %s", i, text, test.want)
		}
	}
}

// A picture is collected for all browsers: it is whole, and kept, also when the one for which it was begun goes away. While the
// next one is collected, and after it has failed, a browser that has none gets the last one, and nothing rests after an error.
func TestPictureOfABrowserThatHasGone(t *testing.T) {
	begun, collected := make(chan bool), make(chan error)
	s := mustServe(t, func(ctx context.Context) (Picture, error) {
		select {
		case begun <- true:
		case <-ctx.Done():
		}
		select {
		case err := <-collected:
			return Picture{Time: time.Unix(1, 0).UTC(), Nodes: []Node{{Name: "node-1"}}}, err
		case <-ctx.Done():
			return Picture{Nodes: []Node{{Name: "node-1", Problem: "no answer: " + ctx.Err().Error()}}}, nil
		}
	})
	url := strings.Replace(s.URL(), "/?", "/picture?", 1)
	mustBeWhole := func(when string) {
		t.Helper()
		if code, text, _ := get(t, url, ""); code != 200 || !strings.Contains(text, `{"name":"node-1"}`) {
			t.Fatalf("%s it is %d %s, want a picture without a problem", when, code, text)
		}
	}
	ctx, leave := context.WithCancel(t.Context())
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	lab.Must(t, err)
	gone := make(chan error)
	go func() {
		_, err := http.DefaultClient.Do(request)
		gone <- err
	}()
	<-begun
	leave()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Fatalf("the browser got an answer: %v", err)
	}
	time.AfterFunc(50*time.Millisecond, func() { // the server has noticed that the browser has gone
		select {
		case collected <- nil:
		case <-begun:
			t.Error("the picture is collected anew")
			collected <- nil
		}
	})
	mustBeWhole("after the browser has gone")

	failed := make(chan int)
	go func() {
		code, _, _ := get(t, url+"&after=1970-01-01T00:00:01Z", "")
		failed <- code
	}()
	<-begun
	mustBeWhole("during the next")
	collected <- errors.New("refused")
	if code := <-failed; code != 502 {
		t.Errorf("a picture that cannot be collected is answered with %d, want 502", code)
	}
	if s.last.Load().rests() {
		t.Error("nodes rest after an error")
	}
	go func() {
		code, _, _ := get(t, url+"&after=1970-01-01T00:00:01Z", "")
		failed <- code
	}()
	<-begun
	mustBeWhole("after an error")
	collected <- nil
	if code := <-failed; code != 200 {
		t.Errorf("after an error it is %d, want 200", code)
	}
}
