package kube

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ReadChange reads what a cluster may get, or have no more if deleted is set: a manifest, in YAML or JSON, of Services,
// EndpointSlices and Nodes as an API server has them, of which the Node of another node changes nothing here. The problems are
// parts that are left out.
//
// An error names all objects and fields that an API server would refuse, or complete: without the ClusterIP that a Service
// gets, it cannot be said where clients go.
func ReadChange(content []byte, nodeName string, deleted bool) (lb.Change, []lb.Problem, error) {
	var read manifest
	p := manifestParser{file: "change", nodeName: nodeName, seen: map[key]bool{}, instead: "the change is not tried", out: &read}
	docs, err := documents("change", content)
	if err != nil {
		p.refuse("", err)
	}
	for _, doc := range docs {
		p.add(doc)
	}
	change := lb.Change{Deleted: deleted}
	var problems []lb.Problem
	var errs []error
	for _, p := range read.problems {
		switch {
		case p.Effect == lb.Degraded: // an API server would refuse it
			errs = append(errs, errors.New(p.String()))
		case strings.HasPrefix(p.Field, "spec.") && deleted: // of what is deleted, only the name counts
		case strings.HasPrefix(p.Field, "spec."): // an API server would set it
			errs = append(errs, fmt.Errorf("%s; let the API server complete it: kubectl apply --dry-run=server -o yaml", p))
		default:
			problems = append(problems, p)
		}
	}
	for _, declared := range read.objects {
		object := translate(declared.obj)
		problems = append(problems, object.problems...)
		switch value := object.value.(type) {
		case lb.Service:
			change.Services = append(change.Services, value)
		case Slice:
			change.Slices = append(change.Slices, value.EndpointSlice)
		case Node:
			if deleted {
				errs = append(errs, fmt.Errorf("%s: what follows from the deletion of a Node cannot be said here: its endpoints are those of EndpointSlices", declared.key))
			}
			change.Node = &value.Node
		default:
			problems = append(problems, lb.Problem{Object: declared.key.String(), Message: "it is not considered: Services, EndpointSlices and this node's Node are"})
		}
	}

	return change, problems, errors.Join(errs...)
}
