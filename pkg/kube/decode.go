package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	jsonserializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// manifestKinds are the kinds that are read of manifests, by apiVersion and kind.
var manifestKinds = map[string]kind{
	"v1 Service":                        kindService,
	"discovery.k8s.io/v1 EndpointSlice": kindSlice,
	"v1 Node":                           kindNode,
	"networking.k8s.io/v1 ServiceCIDR":  kindServiceCIDR,
	"v1 Pod":                            kindPod,
	"v1 Namespace":                      kindNamespace,
}

// strictly decodes JSON as an API server does with strict field validation: names are case
// sensitive, and unknown and duplicate ones are errors.
var strictly = jsonserializer.NewSerializerWithOptions(jsonserializer.DefaultMetaFactory, scheme.Scheme, scheme.Scheme,
	jsonserializer.SerializerOptions{Strict: true})

// parse parses the content of a file, or notes why it could not be read. If the file is bad,
// the objects of its last good version stay.
func (m *manifest) parse(name string, content []byte, err error, nodeName string) {
	last := m.objects
	m.objects, m.problems = nil, nil
	p := manifestParser{file: name, nodeName: nodeName, seen: map[key]bool{}, out: m}
	p.instead = "nothing of the file is in force"
	if len(last) > 0 {
		p.instead = "the last good version of the file stays in force"
	}
	var docs []json.RawMessage
	if err == nil {
		docs, err = documents(name, content)
	}
	switch {
	case err != nil:
		p.refuse("", err)
	case len(docs) == 0 && len(last) > 0:
		p.refuse("", errors.New("it has no object any more: remove the file to remove its objects"))
	}
	for _, doc := range docs {
		p.add(doc)
	}
	if p.bad {
		m.objects = last
	}
}

// manifestParser parses one file.
type manifestParser struct {
	file, nodeName string
	seen           map[key]bool
	bad            bool   // the file has an object that an API server would refuse
	instead        string // what is in force if the file is bad
	out            *manifest
}

// note adds a problem of the file, or of an object in it.
func (p *manifestParser) note(object, field, format string, args ...any) {
	title := "manifest " + p.file
	if object != "" {
		title += ", " + object
	}
	p.out.problems = append(p.out.problems, lb.Problem{Object: title, Field: field, Message: fmt.Sprintf(format, args...)})
}

// refuse adds an error as a problem, and marks the file as bad.
func (p *manifestParser) refuse(object string, err error) { p.refuseField(object, "", err.Error()) }

func (p *manifestParser) refuseField(object, field, why string) {
	p.bad = true
	p.note(object, field, "%s; %s", strings.Join(strings.Fields(why), " "), p.instead)
	p.out.problems[len(p.out.problems)-1].Effect = lb.Degraded
}

// add adds the object of a document, or all objects of a List.
func (p *manifestParser) add(doc json.RawMessage) {
	var head struct {
		metav1.TypeMeta `json:",inline"`
		Metadata        struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"metadata"`
		Items []json.RawMessage `json:"items"`
	}
	if !bytes.HasPrefix(doc, []byte("{")) {
		p.refuse("", fmt.Errorf("a document is no object but %.20s", doc))
		return
	}
	if err := json.Unmarshal(doc, &head); err != nil {
		p.refuse(head.Kind, err)
		return
	}
	if head.Kind == "List" && head.APIVersion == "v1" {
		for _, item := range head.Items {
			p.add(item)
		}
		return
	}
	title := strings.TrimSpace(head.Kind + " " + path.Join(head.Metadata.Namespace, head.Metadata.Name))
	known, isKnown := manifestKinds[head.APIVersion+" "+head.Kind]
	k := key{kind: known, name: head.Metadata.Name}
	if known == kindService || known == kindSlice || known == kindPod {
		k.namespace = head.Metadata.Namespace
		if k.namespace == "" {
			k.namespace = metav1.NamespaceDefault
		}
	}
	switch {
	case !isKnown:
		p.note(title, "kind", "%q of apiVersion %q is not read here", head.Kind, head.APIVersion)
		return
	case k.name == "":
		p.refuse(title, errors.New("metadata.name is missing"))
		return
	case p.seen[k]:
		p.note(k.String(), "metadata.name", "the file has it twice; the first one counts")
		return
	}
	p.seen[k] = true
	obj, _, err := strictly.Decode(doc, nil, nil)
	if err != nil {
		p.refuse(k.String(), err)
		return
	}
	obj.(metav1.Object).SetNamespace(k.namespace)
	if refused := refusals(obj); len(refused) > 0 {
		for _, err := range refused {
			p.refuseField(k.String(), err.Field, err.ErrorBody())
		}
		return
	}
	problems := setDefaults(obj, k)
	if !selected(obj, p.nodeName) {
		return
	}
	for _, problem := range problems {
		p.note(k.String(), problem.Field, "%s", problem.Message)
	}
	p.out.objects = append(p.out.objects, declared{k, obj})
}

// setDefaults sets the defaults that an API server would set, where they change the
// meaning of the object. It cannot allocate addresses and ports as an API server does: it
// returns a problem for each that is missing.
func setDefaults(obj runtime.Object, k key) []lb.Problem {
	p := &parser{object: k}
	if slice, ok := obj.(*discoveryv1.EndpointSlice); ok {
		for i := range slice.Ports {
			// To an API server, an empty name is the same as none.
			slice.Ports[i].Name = ptr.To(ptr.Deref(slice.Ports[i].Name, ""))
		}
	}
	service, ok := obj.(*corev1.Service)
	if !ok || service.Spec.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	spec := &service.Spec
	if spec.ClusterIP == "" && len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if len(spec.IPFamilies) == 0 && spec.ClusterIP != corev1.ClusterIPNone {
		spec.IPFamilies = familiesOf(spec.ClusterIPs)
	}
	if spec.ClusterIP == "" {
		p.add("spec.clusterIP", "missing, and none is allocated for a manifest: the Service has no frontends")
	}
	if spec.Type == corev1.ServiceTypeNodePort {
		for i := range spec.Ports {
			if spec.Ports[i].NodePort == 0 {
				p.add(fmt.Sprintf("spec.ports[%d].nodePort", i), "missing, and none is allocated for a manifest")
			}
		}
	}
	return p.problems
}

// familiesOf returns the families of addresses, or nil if one cannot be parsed.
func familiesOf(clusterIPs []string) []corev1.IPFamily {
	var families []corev1.IPFamily
	for _, text := range clusterIPs {
		addr, err := lb.ParseAddr(text)
		switch {
		case err != nil:
			return nil
		case addr.Is4():
			families = append(families, corev1.IPv4Protocol)
		default:
			families = append(families, corev1.IPv6Protocol)
		}
	}
	return families
}

// separator ends a document of YAML. The rest of its line is part of the next document:
// "--- # comment" is allowed.
var separator = regexp.MustCompile(`(?m)^(---|\.\.\.)(\s|$)`)

// documents returns the documents of a manifest as JSON, without empty ones.
func documents(name string, content []byte) ([]json.RawMessage, error) {
	var docs []json.RawMessage
	if filepath.Ext(name) == ".json" {
		for decoder := json.NewDecoder(bytes.NewReader(content)); ; {
			var doc json.RawMessage
			err := decoder.Decode(&doc)
			if errors.Is(err, io.EOF) {
				return docs, nil
			}
			if err != nil {
				var syntax *json.SyntaxError
				read := bytes.TrimRight(content, "\n")
				if errors.As(err, &syntax) {
					read = content[:min(int(syntax.Offset), len(content))]
				}
				return nil, fmt.Errorf("line %d: %w", 1+bytes.Count(read, []byte("\n")), err)
			}
			docs = append(docs, doc)
		}
	}
	begin := 0
	for _, end := range append(separator.FindAllIndex(content, -1), []int{len(content), len(content)}) {
		text := content[begin:end[0]]
		doc, err := yaml.YAMLToJSONStrict(text)
		if err != nil {
			// Parse again with the lines before it, so that the error has the line of the file.
			lines := bytes.Repeat([]byte("\n"), bytes.Count(content[:begin], []byte("\n")))
			_, err = yaml.YAMLToJSONStrict(append(lines, text...))
			return nil, err
		}
		if string(doc) != "null" {
			docs = append(docs, doc)
		}
		begin = end[1]
	}
	return docs, nil
}
