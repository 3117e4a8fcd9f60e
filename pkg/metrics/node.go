package metrics

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// Node has the metrics of an agent and its node at one moment.
type Node struct {
	Synced    bool
	Services  int
	Problems  int                         // parts of objects that were left out
	OfNode    int                         // what of this node is not as it is configured
	Failed    int                         // Services of which a write has failed and is tried again
	Taken     int                         // Services of which another one owns an address
	Writes    map[string]reconcile.Writes // by map
	Fills     map[string]reconcile.Fill   // by map
	Decisions map[maps.Reason]uint64
	LogLost   uint64 // lines of the log that were not read in time
	OpenFiles uint64
	MaxFiles  uint64 // that may be open

	Silence        map[string]time.Duration // since a watch had anything, by resource
	Effective      bool
	Hooks          map[string]bool // whether they are attached
	Others         int             // other instances of Sluice
	Devices        map[string]int  // by class
	DeviceProblems int

	Flows   flow.Status
	Healing health.Healing
}

// NodeCollector collects a [Node] at each scrape.
type NodeCollector struct {
	version    string
	look       func() (Node, error)
	kubernetes prometheus.Metric
}

// NewNodeCollector returns a collector for an agent of this version. An error of look is
// reported in the scrape, beside the other metrics.
func NewNodeCollector(version string, look func() (Node, error)) *NodeCollector {
	return &NodeCollector{version: version, look: look, kubernetes: kubernetesBuild(version)}
}

// kubernetesBuild returns the metric by which components of Kubernetes show their build.
// The version is Sluice's own; labels without a value are empty.
func kubernetesBuild(version string) prometheus.Metric {
	return prometheus.MustNewConstMetric(prometheus.NewDesc(
		"kubernetes_build_info", "Always 1: the version of this component, which is Sluice, and what it was built with.", nil,
		prometheus.Labels{
			"major": "", "minor": "", "git_version": version, "git_commit": "", "git_tree_state": "", "build_date": "",
			"go_version": runtime.Version(), "compiler": runtime.Compiler, "platform": runtime.GOOS + "/" + runtime.GOARCH,
		},
	), prometheus.GaugeValue, 1)
}

// Describe implements [prometheus.Collector].
func (c *NodeCollector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range nodeMetrics {
		to <- m.desc
	}
	to <- c.kubernetes.Desc()
}

// Collect implements [prometheus.Collector].
func (c *NodeCollector) Collect(to chan<- prometheus.Metric) {
	buildInfo.send(to, 1, c.version, runtime.Version())
	to <- c.kubernetes
	node, err := c.look()
	if err != nil {
		to <- prometheus.NewInvalidMetric(synced.desc, err)

		return
	}
	synced.sendBool(to, node.Synced)
	knownServices.send(to, float64(node.Services))
	problems.send(to, float64(node.Problems))
	nodeProblems.send(to, float64(node.OfNode))
	impaired.send(to, float64(node.Failed), "failed")
	impaired.send(to, float64(node.Taken), "taken")
	logLost.send(to, float64(node.LogLost))
	openFiles.send(to, float64(node.OpenFiles))
	openFilesLimit.send(to, float64(node.MaxFiles))
	for resource, lasts := range node.Silence {
		silence.send(to, lasts.Seconds(), resource)
	}

	for name, writes := range node.Writes {
		mapWrites.send(to, float64(writes.Puts), name, "put")
		mapWrites.send(to, float64(writes.Deletes), name, "delete")
	}
	for name, fill := range node.Fills {
		mapEntries.send(to, float64(fill.Used), name)
		if fill.Capacity > 0 {
			mapCapacity.send(to, float64(fill.Capacity), name)
		}
	}

	for reason, count := range node.Decisions {
		decisions.send(to, float64(count), reason.Label())
	}
	effective.sendBool(to, node.Effective)
	for name, attached := range node.Hooks {
		hookAttached.sendBool(to, attached, name)
	}
	otherInstances.send(to, float64(node.Others))
	for class, count := range node.Devices {
		devices.send(to, float64(count), class)
	}
	deviceProblems.send(to, float64(node.DeviceProblems))

	f := &node.Flows
	evictions.send(to, float64(f.Flows.Evicted), maps.NameFlows)
	evictions.send(to, float64(f.HalfOpen.Evicted), maps.NameHalfOpen)
	alarm.sendBool(to, f.Emergency != "", maps.NameFlows)
	alarm.sendBool(to, f.Flood != "", maps.NameHalfOpen)
	alarms.send(to, float64(f.Emergencies), maps.NameFlows)
	alarms.send(to, float64(f.Floods), maps.NameHalfOpen)
	flowsEnded.send(to, float64(f.Expired), "idle")
	flowsEnded.send(to, float64(f.Stale), "stale")
	flowsRepaired.send(to, float64(f.Repaired))
	loadsRepaired.send(to, float64(f.LoadsRepaired))
	masqueradeRetries.send(to, float64(f.MasqueradeRetries))
	stackPorts.send(to, float64(f.StackPorts))
	suspects.send(to, float64(node.Healing.Suspects))
	suspicions.send(to, float64(node.Healing.Episodes))
	passedOver.send(to, float64(node.Healing.PassedOver))
}
