package realproxy

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// The default addresses of kube-proxy's health and metrics.
const (
	healthURL  = "http://127.0.0.1:10256/livez"
	metricsURL = "http://127.0.0.1:10249/metrics"
)

// syncCheck finds out whether the kube-proxy of a namespace has programmed IPv4 once. Only its
// metrics have that, which cost it a lot of work; so they are read only when its
// health endpoint has a new timestamp.
type syncCheck struct {
	ns      *lab.Namespace
	updated string // IPv4, when last seen
}

var errNoSync = errors.New("it has not programmed IPv4")

// once returns nil once IPv4 is programmed.
func (c *syncCheck) once() error {
	text, err := c.get(healthURL)
	if err != nil {
		return err
	}
	var health struct {
		Status map[string]struct{ LastUpdated string }
	}
	if err := json.Unmarshal(text, &health); err != nil {
		return fmt.Errorf("health of kube-proxy: %w", err)
	}
	updated := health.Status["IPv4"].LastUpdated // also when it has only begun
	if updated == c.updated {
		return errNoSync
	}
	metrics, err := c.get(metricsURL)
	if err != nil {
		return err
	}
	const gauge = `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} `
	_, value, ok := strings.Cut(string(metrics), gauge)
	if !ok || strings.HasPrefix(value, "0\n") {
		c.updated = updated
		return errNoSync
	}

	return nil
}

// get asks for a page inside the namespace.
func (c *syncCheck) get(url string) ([]byte, error) {
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	request.Close = true
	conn, err := c.ns.Dial("tcp", request.URL.Host, time.Second)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return nil, err
	}
	if err := request.Write(conn); err != nil {
		return nil, err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()

	return io.ReadAll(response.Body)
}
