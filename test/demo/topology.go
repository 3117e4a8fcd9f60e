package main

import (
	"fmt"
	"strings"

	"github.com/sluice-lb/sluice/test/lab"
)

// podWidth is how wide a pod is drawn.
const podWidth = 23

// draw shows the node, its pods and the Services, with their addresses.
func (s *stage) draw() {
	var names, ipv4, ipv6, does []string
	for _, pod := range s.node.Pods {
		names = append(names, s.out.styled(bold, fmt.Sprintf("%-*s", podWidth, pod.Name)))
		ipv4 = append(ipv4, fmt.Sprintf("%-*s", podWidth, pod.IPv4))
		ipv6 = append(ipv6, fmt.Sprintf("%-*s", podWidth, pod.IPv6))
		does = append(does, fmt.Sprintf("%-*s", podWidth, s.does(pod)))
	}
	inner := podWidth*len(names) + 1
	title := fmt.Sprintf(" %s  %s  %s ", s.node.Name, s.node.IPv4, s.node.IPv6)

	s.out.line("  ┌─%s%s┐", s.out.styled(bold, title), strings.Repeat("─", inner-1-len(title)))
	for _, row := range [][]string{names, ipv4, ipv6, does} {
		s.out.line("  │ %s│", strings.Join(row, ""))
	}
	pipes, joints := s.wires()
	s.out.line("  │ %s│", pipes)
	s.out.line("  │ %s│", joints)
	s.out.line("  └%s┘", strings.Repeat("─", inner))
	for _, text := range []string{
		fmt.Sprintf("web    %s  %s  node port %d", webIPv4, webIPv6, webNode),
		fmt.Sprintf("dns    %s over UDP", dnsIPv4),
		fmt.Sprintf("empty  %s  no endpoints", emptyIPv4),
	} {
		s.out.line("    Service %s", text)
	}
	s.out.gap()
}

func (s *stage) does(pod *lab.Pod) string {
	if pod == s.clientIn {
		return "the client"
	}

	return fmt.Sprintf("web :%d  dns :%d", webPort, dnsPort)
}

// wires are what joins the pods to the node's bridge, in two lines.
func (s *stage) wires() (pipes, joints string) {
	last := len(s.node.Pods) - 1
	for i := range s.node.Pods {
		pipes += fmt.Sprintf("   %-*s", podWidth-3, "│")
		switch i {
		case 0:
			joints += "   └" + strings.Repeat("─", podWidth-4)
		case last:
			joints += fmt.Sprintf("───┘%-*s", podWidth-4, " br0")
		default:
			joints += "───┴" + strings.Repeat("─", podWidth-4)
		}
	}

	return pipes, joints
}
