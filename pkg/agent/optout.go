package agent

import (
	"cmp"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/status"
)

// optOuts are the Pods of this node, and the Namespaces that have a say in whether their
// sockets are left alone.
type optOuts struct {
	enabled    bool // or else none opts out: manifests may have Pods nevertheless
	pods       map[podName]kube.Pod
	namespaces map[string]kube.SocketChoice
	changed    bool
	// awaited is set until all Pods and Namespaces were received. What an earlier agent
	// programmed stays until then.
	awaited bool
}

type podName struct{ namespace, name string }

func newOptOuts(enabled bool) optOuts {
	return optOuts{
		enabled: enabled, pods: map[podName]kube.Pod{}, namespaces: map[string]kube.SocketChoice{}, changed: true, awaited: enabled,
	}
}

func (o *optOuts) setPod(pod kube.Pod) {
	name := podName{pod.Namespace, pod.Name}
	o.changed = o.changed || o.pods[name] != pod
	o.pods[name] = pod
	if pod.UID == "" {
		delete(o.pods, name)
	}
}

func (o *optOuts) setNamespace(namespace kube.Namespace) {
	o.changed = o.changed || o.namespaces[namespace.Name] != namespace.Socket
	o.namespaces[namespace.Name] = namespace.Socket
	if namespace.Socket == kube.SocketUndecided {
		delete(o.namespaces, namespace.Name)
	}
}

// list returns the Pods that have opted out, sorted by name.
func (o *optOuts) list() []kube.Pod {
	if !o.enabled {
		return nil
	}
	var out []kube.Pod
	for _, pod := range o.pods {
		choice := pod.Socket
		if choice == kube.SocketUndecided {
			choice = o.namespaces[pod.Namespace]
		}
		if choice == kube.SocketOff {
			out = append(out, pod)
		}
	}
	slices.SortFunc(out, func(a, b kube.Pod) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})

	return out
}

// podsReceived ends the wait for Pods and Namespaces.
func (m *model) podsReceived() { m.optOuts.awaited = false }

// newOptedOut returns the UIDs of the Pods that have opted out, if they are known and may have
// changed.
func (m *model) newOptedOut() ([]string, bool) {
	if !m.optOuts.changed || m.optOuts.awaited {
		return nil, false
	}
	m.optOuts.changed = false
	var uids []string
	for _, pod := range m.optOuts.list() {
		uids = append(uids, pod.UID)
	}

	return uids, true
}

// findCgroups sets which of the Pods that have opted out have no cgroup. It reads all cgroups, so it
// is not for the loop.
func findCgroups(s *status.Status) error {
	if len(s.OptedOut) == 0 {
		return nil
	}
	var uids []string
	for _, pod := range s.OptedOut {
		uids = append(uids, pod.UID)
	}
	found, err := datapath.PodsWithCgroup(s.CgroupRoot, uids)
	for i := range s.OptedOut {
		s.OptedOut[i].NoCgroup = !found[s.OptedOut[i].UID]
	}

	return err
}
