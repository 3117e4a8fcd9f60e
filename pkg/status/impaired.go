package status

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// ErrorsOf returns the Services that are not in the maps as they should be, and why.
func ErrorsOf(statuses iter.Seq[reconcile.Status]) []ServiceError {
	errs := []ServiceError{}
	lost := make(losses)
	for status := range statuses {
		for _, text := range failureTexts(status) {
			errs = append(errs, ServiceError{Service: status.Service.String(), Error: text, Retry: status.Retry})
		}
		lost.add(status)
	}
	for service, texts := range lost.texts() {
		for _, text := range texts {
			errs = append(errs, ServiceError{Service: service.String(), Error: text})
		}
	}
	slices.SortFunc(errs, func(x, y ServiceError) int {
		return cmp.Or(cmp.Compare(x.Service, y.Service), cmp.Compare(x.Error, y.Error))
	})

	return errs
}

// Impaired are the Services that are not in the maps as they should be, each with a short text
// why: [ErrorsOf] has every failure.
type Impaired struct {
	Failed map[lb.ServiceName]string // writes have failed, and are tried again
	Taken  map[lb.ServiceName]string // other Services own addresses that these claim
	Takers map[lb.ServiceName]string // they take clients from others: see [reconcile.Overlap]
}

// ImpairedOf returns the Services of statuses that are impaired.
func ImpairedOf(statuses iter.Seq[reconcile.Status]) Impaired {
	i := Impaired{Failed: make(map[lb.ServiceName]string), Taken: make(map[lb.ServiceName]string), Takers: make(map[lb.ServiceName]string)}
	lost := make(losses)
	for status := range statuses {
		if len(status.Failures) > 0 {
			i.Failed[status.Service] = ListText(failureTexts(status))
		}
		if len(status.Overlaps) > 0 {
			i.Takers[status.Service] = ListText(OverlapTexts(status.Overlaps))
		}
		lost.add(status)
	}
	for service, texts := range lost.texts() {
		i.Taken[service] = ListText(texts)
	}

	return i
}

// failureTexts returns why a Service is not in the maps as it should be, and first who has the room that it lacks.
func failureTexts(status reconcile.Status) []string {
	var texts []string
	if holder := status.Holder; holder.Namespace != "" {
		texts = append(texts, "there is no room, and Services of namespace "+holder.Namespace+" have the most "+holder.Of)
	}
	for _, f := range status.Failures {
		texts = append(texts, f.Error())
	}

	return texts
}

// losses are texts of what other Services have of what each Service claims. A text names each address once, whatever
// the scopes.
type losses map[lb.ServiceName][]string

func (l losses) add(status reconcile.Status) {
	for _, lost := range status.Lost {
		l[status.Service] = append(l[status.Service], fmt.Sprintf("%s belongs to Service %s", frontendText(lost.Frontend), lost.Owner))
	}
	for _, o := range status.Overlaps {
		what := frontendText(o.Frontend)
		if o.NodePort {
			what = fmt.Sprintf("node port %d/%s at %s", o.Frontend.Port, o.Frontend.Protocol, o.Frontend.Addr)
		}
		l[o.Other] = append(l[o.Other], fmt.Sprintf("%s belongs to Service %s", what, status.Service))
	}
}

func (l losses) texts() map[lb.ServiceName][]string {
	for service, texts := range l {
		slices.Sort(texts)
		l[service] = slices.Compact(texts)
	}

	return l
}

// OverlapTexts describe overlaps of one Service, each address once.
func OverlapTexts(overlaps []reconcile.Overlap) []string {
	var texts []string
	for _, o := range overlaps {
		what := "the ClusterIP"
		if o.NodePort {
			what = fmt.Sprintf("node port %d/%s", o.Frontend.Port, o.Frontend.Protocol)
		}
		texts = append(texts, fmt.Sprintf("%s gets clients of %s of Service %s", frontendText(o.Frontend), what, o.Other))
	}
	slices.Sort(texts)

	return slices.Compact(texts)
}

func frontendText(f lb.FrontendKey) string {
	switch {
	case f.Addr.IsUnspecified():
		return fmt.Sprintf("node port %d/%s", f.Port, f.Protocol)
	case f.Port == 0: // of a ClusterIP, the rest
		return f.Addr.String()
	}

	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(f.Addr, f.Port), f.Protocol)
}

// spelledOut is how many texts [ListText] spells out.
const spelledOut = 3

// ListText joins the first of these texts, with the number of the others.
func ListText(texts []string) string {
	if more := len(texts) - spelledOut; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(texts[:spelledOut], "; "), more)
	}

	return strings.Join(texts, "; ")
}
