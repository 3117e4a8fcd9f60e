package status

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// DefaultSocket is the default of the socket on which the agent answers the other verbs.
const DefaultSocket = "/run/sluice/agent.sock"

// ErrNotRunning is returned by a [Client] when no agent answers.
var ErrNotRunning = errors.New("no agent is running")

// ErrHung is returned by a [Client] when an agent runs, and its loop does not answer in time.
var ErrHung = errors.New("the agent does not answer")

// pingTimeout limits how long the loop of an agent may take to answer, before a [Client] asks it for anything: an agent
// that is busy answers within milliseconds.
const pingTimeout = 2 * time.Second

// answerTimeout limits how long a whole answer may take, which waits for those before it.
const answerTimeout = 2 * time.Minute

// Server answers the other verbs for an agent.
type Server struct {
	Socket string
	Log    *slog.Logger

	// Ping asks the loop for nothing. Status returns the fields of [Status] that the agent's loop knows, Model all
	// that it knows of Services. All ask the loop, and any goroutine may call them.
	Ping   func(context.Context) error
	Status func(context.Context) (Status, error)
	Model  func(context.Context) (Model, error)
	// Try returns what is known of a change: a manifest, as the agent's package kube reads it. If deleted is set, the cluster would have its objects no more.
	Try    func(ctx context.Context, content []byte, deleted bool) (TrialInput, error)
	Tables maps.Tables

	streams chan struct{} // holds the answer in parts that is being made

	// The server adds the state of these to a Status.
	Datapath *datapath.Datapath
	Hooks    *datapath.HookMonitor
	Devices  *datapath.DeviceMonitor
	Flows    func() flow.Status
}

// Run answers on a socket that only root can open, until ctx ends.
func (s Server) Run(ctx context.Context) error {
	// A socket that an earlier agent left would refuse the new one.
	if err := os.Remove(s.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("socket of an earlier agent: %w", err)
	}
	listener, err := net.Listen("unix", s.Socket)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	// The next agent removes it. Our own end must not remove that agent's socket.
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := os.Chmod(s.Socket, 0o600); err != nil {
		return errors.Join(fmt.Errorf("socket: %w", err), listener.Close())
	}

	mux := http.NewServeMux()
	mux.HandleFunc("GET /ping", s.answer(func(r *http.Request) (any, error) { return struct{}{}, s.Ping(r.Context()) }))
	mux.HandleFunc("GET /status", s.answer(func(r *http.Request) (any, error) { return s.status(r.Context()) }))
	s.streams = make(chan struct{}, 1)
	mux.HandleFunc("GET /services", s.answerInParts(s.services))
	mux.HandleFunc("GET /desired", s.answerInParts(s.desired))
	mux.HandleFunc("GET /selection", s.answer(func(r *http.Request) (any, error) { return s.selection(r.Context(), r.URL.Query()) }))
	mux.HandleFunc("POST /try", s.answer(s.try))
	if err := health.ServeUntil(ctx, health.NewHTTPServer(mux, new(health.Connections)), listener); err != nil {
		return fmt.Errorf("socket: %w", err)
	}

	return nil
}

// answer returns a handler that sends the result of compute as JSON.
func (s Server) answer(compute func(*http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		value, err := compute(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)

			return
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(value); err != nil {
			s.Log.Warn("answer not sent", "request", r.URL.Path, "error", err)
		}
	}
}

// services answers [Client.Services] and [Client.Service].
func (s Server) services(r *http.Request, to *stream) error {
	model, err := s.Model(r.Context())
	if err != nil {
		return err
	}
	name := r.URL.Query().Get("name")
	if name != "" {
		if model, err = model.Named(name); err != nil {
			return err
		}
		name = model.Snapshots[0].Service.Name.String()
	}
	states, err := newStates(&s.Tables, name)
	if err != nil {
		return err
	}
	one := newViews()
	for svc := range model.services(func() *views { return one }) {
		if err := states.add(&svc); err != nil {
			return err
		}
		if err := to.service(svc); err != nil {
			return err
		}
	}

	return nil
}

// desired answers [Client.Desired].
func (s Server) desired(r *http.Request, to *stream) error {
	model, err := s.Model(r.Context())
	if err != nil {
		return err
	}
	last := ""
	for f := range model.Desired() {
		service, _, _ := strings.Cut(f.Service, ":")
		if service != last {
			if err := to.begin(Service{Name: service}); err != nil {
				return err
			}
			last = service
		}
		if err := to.frontend(f); err != nil {
			return err
		}
	}

	return nil
}

// status returns the state of the agent, and of its maps and programs in the kernel. It asks
// the loop first, because the kernel takes longer. What cannot be read does not hide the rest.
func (s Server) status(ctx context.Context) (Status, error) {
	status, err := s.Status(ctx)
	if err != nil {
		return status, err
	}
	unread := func(what string, err error) {
		if err != nil {
			status.Unread = append(status.Unread, what+": "+err.Error())
		}
	}
	status.Running = true
	status.NotCovered = notCovered(status.CgroupRoot)
	var uids []string
	for _, pod := range status.OptedOut {
		uids = append(uids, pod.UID)
	}
	if len(uids) > 0 {
		found, err := datapath.PodsWithCgroup(status.CgroupRoot, uids)
		unread("cgroups of pods that have opted out", err)
		for i, pod := range status.OptedOut {
			status.OptedOut[i].NoCgroup = err == nil && !found[pod.UID]
		}
	}
	status.setEffective(s.Hooks.Effective())
	status.Flows = s.Flows()
	status.Missing = s.Datapath.Features().Missing()
	status.MasqueradePorts, status.PortsProblem = s.Devices.MasqueradePorts()
	if missing := s.Datapath.MissingPins(); len(missing) > 0 {
		status.Unpinned = fmt.Sprintf("%d pins are missing: %s", len(missing), missing[0])
	}
	if err := s.Hooks.Unpinned(); err != nil {
		status.Unpinned = err.Error()
	}
	status.Files, err = datapath.ReadFiles()
	unread("files of the agent", err)
	status.Hooks, err = s.Datapath.Hooks()
	unread("hooks", err)
	status.Devices, err = s.Devices.Status()
	unread("devices", err)
	status.Others, err = s.Datapath.Others()
	unread("other programs of Sluice", err)
	unread("maps", status.readMaps(s.Datapath.Maps()))

	return status, nil
}

// selection answers [Client.Selection].
func (s Server) selection(ctx context.Context, query url.Values) (Selection, error) {
	var key lb.FrontendKey
	addr, err := netip.ParseAddrPort(query.Get("address"))
	if err := errors.Join(err, key.Protocol.UnmarshalText([]byte(query.Get("protocol"))), key.Scope.UnmarshalText([]byte(query.Get("scope")))); err != nil {
		return Selection{}, err
	}
	key.Addr, key.Port = addr.Addr(), addr.Port()
	model, err := s.Model(ctx)
	if err != nil {
		return Selection{}, err
	}
	selection, ok := model.Selection(query.Get("service"), key)
	if !ok {
		return Selection{}, fmt.Errorf("Service %s has no frontend %s any more", query.Get("service"), key)
	}

	return selection, nil
}

// try answers [Client.Try].
func (s Server) try(r *http.Request) (any, error) {
	content, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, mostChange))
	if err != nil {
		return nil, err
	}
	select {
	case s.streams <- struct{}{}: // one at a time
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	defer func() { <-s.streams }()
	tried, err := s.Try(r.Context(), content, r.URL.Query().Has("deleted"))
	if err != nil {
		return nil, err
	}

	return tried.trial(r.Context(), &s.Tables)
}

// mostChange is how many bytes a change may have.
const mostChange = 16 << 20

// Client asks a running agent.
type Client struct {
	http *http.Client
}

// NewClient returns a client of the agent that listens on a socket.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOTSOCK) {
			return nil, fmt.Errorf("%w: %w", ErrNotRunning, err)
		}

		return conn, err
	}

	return &Client{http: &http.Client{
		Transport: &http.Transport{DialContext: dial},
		Timeout:   answerTimeout,
	}}
}

// Status returns the state of the agent. The error wraps [ErrNotRunning] if none runs, and [ErrHung] if
// one does not answer in time, as do the errors of the other methods.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return ask[Status](ctx, c, "/status")
}

// Services returns every Service that the agent knows, sorted by name. Frontends of a Service share lists.
func (c *Client) Services(ctx context.Context) ([]Service, error) {
	services := []Service{}
	err := c.EachService(ctx, func(svc Service) { services = append(services, svc) })

	return services, err
}

// EachService calls do with every Service that the agent knows, sorted by name.
func (c *Client) EachService(ctx context.Context, do func(Service)) error {
	return askInParts(ctx, c, "/services", func(svc Service) error {
		do(svc)

		return nil
	}, noFrontend, func(array *json.Decoder) error {
		var services []Service
		err := array.Decode(&services)
		for _, svc := range services {
			do(svc)
		}

		return err
	})
}

// Service returns the Service that is called name, see [ServiceNamed].
func (c *Client) Service(ctx context.Context, name string) (Service, error) {
	var services []Service
	err := askInParts(ctx, c, "/services?"+url.Values{"name": {name}}.Encode(), func(svc Service) error {
		services = append(services, svc)

		return nil
	}, noFrontend, func(array *json.Decoder) error {
		err := array.Decode(&services)
		if err == nil {
			services, err = OnlyNamed(services, name)
		}

		return err
	})
	if err == nil && len(services) != 1 {
		err = fmt.Errorf("agent: %d Services instead of one", len(services))
	}
	if err != nil {
		return Service{}, err
	}

	return services[0], nil
}

func noFrontend(f Frontend) error { return fmt.Errorf("frontend %s is of no port", f.Key()) }

// Desired returns the frontends that should be programmed, those of a Service together.
func (c *Client) Desired(ctx context.Context) ([]Frontend, error) {
	var frontends []Frontend
	err := askInParts(ctx, c, "/desired", func(Service) error { return nil }, func(f Frontend) error {
		frontends = append(frontends, f)

		return nil
	}, func(array *json.Decoder) error { return array.Decode(&frontends) })

	return frontends, err
}

// Selection returns how the backends of a frontend of a Service (NAMESPACE/NAME) were selected.
func (c *Client) Selection(ctx context.Context, service string, key lb.FrontendKey) (Selection, error) {
	query := url.Values{
		"service": {service}, "address": {netip.AddrPortFrom(key.Addr, key.Port).String()},
		"protocol": {key.Protocol.String()}, "scope": {key.Scope.String()},
	}

	return ask[Selection](ctx, c, "/selection?"+query.Encode())
}

// Try returns what a change would make of the Services of the node, if the cluster got its objects, or had them no more. The
// content is a manifest.
func (c *Client) Try(ctx context.Context, content []byte, deleted bool) (Trial, error) {
	var trial Trial
	if err := c.ping(ctx); err != nil {
		return trial, err
	}
	path := "/try"
	if deleted {
		path += "?deleted"
	}
	response, err := c.send(ctx, http.MethodPost, path, bytes.NewReader(content))
	if err != nil {
		return trial, err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&trial); err != nil {
		return trial, fmt.Errorf("agent: %s: %w", path, err)
	}

	return trial, nil
}

// ask gets an answer of the agent, which may take long to compute.
func ask[T any](ctx context.Context, c *Client, path string) (T, error) {
	var value T
	if err := c.ping(ctx); err != nil {
		return value, err
	}
	response, err := c.get(ctx, path)
	if err != nil {
		return value, err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&value); err != nil {
		return value, fmt.Errorf("agent: %s: %w", path, err)
	}

	return value, nil
}

// ping returns an error wrapping [ErrHung] if the agent's loop does not answer in time. An agent of an older build knows
// no pings, and is asked nevertheless; so is one that does not run, whose error is that of the question.
func (c *Client) ping(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	response, err := c.get(limited, "/ping")
	if err == nil {
		_, err = io.Copy(io.Discard, response.Body)
		err = errors.Join(err, response.Body.Close())
	}
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("%w within %v", ErrHung, pingTimeout)
	}

	return nil
}

// get asks, and returns the answer unless it is an error. The caller closes its body.
func (c *Client) get(ctx context.Context, path string) (*http.Response, error) {
	return c.send(ctx, http.MethodGet, path, nil)
}

// send is get with a method and a body.
func (c *Client) send(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, body)
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", path, err)
	}
	request.Header.Set("Accept", streamType)
	response, err := c.http.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) && errors.Is(err, ErrNotRunning) {
			return nil, failed.Err
		}

		return nil, fmt.Errorf("agent: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 4096))

		return nil, errors.Join(fmt.Errorf("agent: %s: %s: %s", path, response.Status, bytes.TrimSpace(text)), response.Body.Close())
	}

	return response, nil
}

// LockSocket takes the lock of a socket, so that no other agent answers there until release
// is called: an agent that starts removes the socket that it finds. It makes the socket's
// folder if it is missing. The error wraps [datapath.ErrRunning] if another agent has the lock.
func LockSocket(socket string) (release func() error, err error) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		return nil, fmt.Errorf("socket directory: %w", err)
	}
	return lockFile(socket, os.O_CREATE|os.O_RDWR)
}

// LockUsedSocket takes the lock of a socket if an agent has ever used it. Cleanups take it
// beside the [datapath.MapsLock], because older builds of the agent lock nothing but their socket. The
// error wraps [datapath.ErrRunning] if an agent has the lock.
func LockUsedSocket(socket string) (release func() error, err error) {
	release, err = lockFile(socket, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return func() error { return nil }, nil
	}

	return release, err
}

func lockFile(socket string, flags int) (release func() error, err error) {
	path := socket + ".lock"
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of the socket: %w", err)
	}
	if err := datapath.LockFile(f); err != nil {
		return nil, errors.Join(fmt.Errorf("socket %q: %w", socket, err), f.Close())
	}
	locked, err := f.Stat()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock of the socket: %w", err), f.Close())
	}
	// A cleanup may have removed the file since it was opened: its lock would keep out no one.
	if is, err := os.Lstat(path); err != nil || !os.SameFile(is, locked) {
		return nil, errors.Join(fmt.Errorf("socket %q: %w: a cleanup", socket, datapath.ErrRunning), f.Close())
	}

	return f.Close, nil
}

// RemoveSocket removes a socket and its lock, of which the caller has the latter, and their folder if nothing else is there.
func RemoveSocket(socket string) error {
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("socket: %w", err)
	}
	err := os.Remove(socket + ".lock")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no agent has been here
	}
	_ = os.Remove(filepath.Dir(socket)) // it may be a mount, or have other files

	return err
}
