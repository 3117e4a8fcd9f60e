package differential

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
)

// compareHealth asks the health check node ports of all Services, in both families:
// both proxies answer the same, or neither listens. Not of Services with slices whose
// ports are none of theirs: kube-proxy counts endpoints there, too, that no client
// can reach.
func (c *comparison) compareHealth() error {
	var asking errgroup.Group
	for name, svc := range c.objects.services {
		if svc.Spec.HealthCheckNodePort == 0 || c.objects.hasForeignPorts(svc) {
			continue
		}
		for _, ip := range hostAddresses(1) {
			at := netip.AddrPortFrom(ip, uint16(svc.Spec.HealthCheckNodePort))
			asking.Go(func() error {
				text, err := c.oneHealth(at)
				if text != "" {
					c.mu.Lock()
					defer c.mu.Unlock()
					c.wrongs = append(c.wrongs, wrong{clients[0], frontend{service: name, kind: "health check", protocol: "http", address: at}, text})
				}
				return err
			})
		}
	}

	return asking.Wait()
}

// oneHealth returns how the answers differ, when both have had time to learn what is to
// be said.
func (c *comparison) oneHealth(at netip.AddrPort) (string, error) {
	text := ""
	for attempt := range c.attempts {
		time.Sleep(time.Duration(attempt) * 500 * time.Millisecond)
		var answers [2]string
		err := eachSide(c.sides, func(i int, s *side) (err error) {
			answers[i], err = s.health(at)
			return err
		})
		if err != nil || answers[0] == answers[1] {
			return "", err
		}
		text = fmt.Sprintf("\n\tkube-proxy: %s\n\tsluice:     %s", answers[0], answers[1])
	}

	return text, nil
}

// health is what a health check node port answers: code, headers that matter,
// and body.
func (s *side) health(at netip.AddrPort) (string, error) {
	client := http.Client{Timeout: waitTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			return s.Nodes[0].Dial(network, address, waitTimeout)
		},
	}}
	response, err := client.Get("http://" + at.String())
	if errors.Is(err, syscall.ECONNREFUSED) {
		return "no process listens", nil
	}
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return "", err
	}
	text := []string{response.Status}
	for _, name := range []string{"Content-Type", "X-Content-Type-Options", "X-Load-Balancing-Endpoint-Weight"} {
		text = append(text, name+": "+response.Header.Get(name))
	}

	return strings.Join(append(text, string(body)), "; "), nil
}

// hasForeignPorts reports whether slices of a Service have ports that it does not have.
func (o objects) hasForeignPorts(svc *corev1.Service) bool {
	for _, slice := range o.slicesOf(svc.Name) {
		for _, port := range slice.Ports {
			own := slices.ContainsFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool {
				return p.Name == *port.Name && p.Protocol == *port.Protocol
			})
			if !own {
				return true
			}
		}
	}

	return false
}
