package kube

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ReadChange reads what a cluster may get: a manifest, in YAML or JSON, of Services, EndpointSlices and Nodes as an API server
// has them, of which the Node of another node changes nothing here. The problems are parts that are left out.
//
// An error names all objects and fields that an API server would refuse, or complete: without the ClusterIP that a Service
// gets, what clients will reach cannot be said.
func ReadChange(content []byte, nodeName string) (lb.Change, []lb.Problem, error) {
	var read manifest
	read.parse("change", content, nil, nodeName)
	var change lb.Change
	var problems []lb.Problem
	var errs []error
	for _, p := range read.problems {
		switch {
		case p.Effect == lb.Degraded: // an API server would refuse it
			errs = append(errs, errors.New(p.String()))
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
			change.Node = &value.Node
		default:
			problems = append(problems, lb.Problem{Object: declared.key.String(), Message: "it is not considered: Services, EndpointSlices and this node's Node are"})
		}
	}

	return change, problems, errors.Join(errs...)
}
