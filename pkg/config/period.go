package config

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func (p *problems) notNegative(name string, d metav1.Duration) {
	if d.Duration < 0 {
		p.add(name, d.Duration.String(), notNegative)
	}
}

func (p *problems) notNegativeCount(name string, count int32) {
	if count < 0 {
		p.add(name, count, notNegative)
	}
}

func (p *problems) positive(name string, d metav1.Duration) {
	if d.Duration <= 0 {
		p.add(name, d.Duration.String(), "must be more than 0")
	}
}

// checkPeriods checks the periods of the mode's section, as kube-proxy does.
func (p *problems) checkPeriods(cfg *KubeProxy) {
	p.positive("configSyncPeriod", cfg.ConfigSyncPeriod)
	sync, least := periods(cfg)
	syncName, leastName := section(cfg)+".syncPeriod", section(cfg)+".minSyncPeriod"
	p.positive(syncName, *sync)
	p.notNegative(leastName, *least)
	if least.Duration > sync.Duration {
		p.add(syncName, sync.Duration.String(), fmt.Sprintf("must not be less than %s, %s", path(leastName), least.Duration))
	}
}

func (p *problems) checkConntrack(cfg *KubeProxy) {
	ct := cfg.Conntrack
	p.notNegativeCount("conntrack.maxPerCore", *ct.MaxPerCore)
	p.notNegativeCount("conntrack.min", *ct.Min)
	p.notNegative("conntrack.tcpEstablishedTimeout", *ct.TCPEstablishedTimeout)
	p.notNegative("conntrack.tcpCloseWaitTimeout", *ct.TCPCloseWaitTimeout)
	p.notNegative("conntrack.udpTimeout", ct.UDPTimeout)
	p.notNegative("conntrack.udpStreamTimeout", ct.UDPStreamTimeout)
}
