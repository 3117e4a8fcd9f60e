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
	for status := range statuses {
		for _, text := range failureTexts(status.Failures) {
			errs = append(errs, ServiceError{Service: status.Service.String(), Error: text, Retry: status.Retry})
		}
		for _, text := range lossTexts(status.Lost) {
			errs = append(errs, ServiceError{Service: status.Service.String(), Error: text})
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
}

// ImpairedOf returns the Services of statuses that are impaired.
func ImpairedOf(statuses iter.Seq[reconcile.Status]) Impaired {
	i := Impaired{Failed: make(map[lb.ServiceName]string), Taken: make(map[lb.ServiceName]string)}
	for status := range statuses {
		if len(status.Failures) > 0 {
			i.Failed[status.Service] = ListText(failureTexts(status.Failures))
		}
		if len(status.Lost) > 0 {
			i.Taken[status.Service] = ListText(lossTexts(status.Lost))
		}
	}

	return i
}

func failureTexts(failures []reconcile.Failure) []string {
	texts := make([]string, len(failures))
	for i, f := range failures {
		texts[i] = f.Error()
	}

	return texts
}

// lossTexts name each address once, whatever the scopes.
func lossTexts(lost []reconcile.Loss) []string {
	var texts []string
	for _, l := range lost {
		f := l.Frontend
		what := fmt.Sprintf("%s/%s", netip.AddrPortFrom(f.Addr, f.Port), f.Protocol)
		switch {
		case f.Addr.IsUnspecified():
			what = fmt.Sprintf("node port %d/%s", f.Port, f.Protocol)
		case f.Port == 0: // of a ClusterIP, the rest
			what = f.Addr.String()
		}
		texts = append(texts, what+" belongs to Service "+l.Owner.String())
	}
	slices.Sort(texts)

	return slices.Compact(texts)
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
