package scene

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// Ports are those of most Services: 80 for TCP and UDP.
func Ports() []corev1.ServicePort {
	return []corev1.ServicePort{
		{Name: "tcp", Port: ServicePort, Protocol: corev1.ProtocolTCP},
		{Name: "udp", Port: ServicePort, Protocol: corev1.ProtocolUDP},
	}
}

// Change sets fields of a Service.
type Change func(*corev1.Service)

// CreateService creates a Service with both families and both ports, unless the
// changes set others.
func (o *Objects) CreateService(t testing.TB, name string, changes ...Change) *corev1.Service {
	t.Helper()
	svc := object.Service(o.Namespace, name, nil, Ports()...)
	svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
	for _, change := range changes {
		change(svc)
	}
	svc, err := o.Client.CoreV1().Services(o.Namespace).Create(t.Context(), svc, metav1.CreateOptions{})
	lab.Must(t, err)

	return svc
}

// ChangeService changes a Service, and returns what the API server made of it.
func (o *Objects) ChangeService(t testing.TB, name string, changes ...Change) *corev1.Service {
	t.Helper()
	services := o.Client.CoreV1().Services(o.Namespace)
	var svc *corev1.Service
	lab.Must(t, retry.RetryOnConflict(retry.DefaultRetry, func() (err error) {
		if svc, err = services.Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		for _, change := range changes {
			change(svc)
		}
		svc, err = services.Update(t.Context(), svc, metav1.UpdateOptions{})

		return err
	}))

	return svc
}

// SetLoadBalancer is what a cloud controller writes.
func (o *Objects) SetLoadBalancer(t testing.TB, name string, ingress ...corev1.LoadBalancerIngress) {
	t.Helper()
	services := o.Client.CoreV1().Services(o.Namespace)
	lab.Must(t, retry.RetryOnConflict(retry.DefaultRetry, func() error {
		svc, err := services.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		svc.Status.LoadBalancer.Ingress = ingress
		_, err = services.UpdateStatus(t.Context(), svc, metav1.UpdateOptions{})

		return err
	}))
}

// DeleteService deletes a Service, and leaves its slices.
func (o *Objects) DeleteService(t testing.TB, name string) {
	t.Helper()
	lab.Must(t, o.Client.CoreV1().Services(o.Namespace).Delete(t.Context(), name, metav1.DeleteOptions{}))
}

// OfType makes a Service one of a type.
func OfType(kind corev1.ServiceType) Change {
	return func(svc *corev1.Service) { svc.Spec.Type = kind }
}

// NodePort and LoadBalancer are what [OfType] makes of it.
var (
	NodePort     = OfType(corev1.ServiceTypeNodePort)
	LoadBalancer = OfType(corev1.ServiceTypeLoadBalancer)
)

// ExternalLocal and InternalLocal set the traffic policies to Local,
// ExternalCluster and InternalCluster back.
var (
	ExternalLocal   = external(corev1.ServiceExternalTrafficPolicyLocal)
	ExternalCluster = external(corev1.ServiceExternalTrafficPolicyCluster)
	InternalLocal   = internal(corev1.ServiceInternalTrafficPolicyLocal)
	InternalCluster = internal(corev1.ServiceInternalTrafficPolicyCluster)
)

func external(policy corev1.ServiceExternalTrafficPolicy) Change {
	return func(svc *corev1.Service) { svc.Spec.ExternalTrafficPolicy = policy }
}

func internal(policy corev1.ServiceInternalTrafficPolicy) Change {
	return func(svc *corev1.Service) { svc.Spec.InternalTrafficPolicy = &policy }
}

// Affinity switches session affinity on, with a timeout in seconds, or off: 0.
func Affinity(seconds int32) Change {
	return func(svc *corev1.Service) {
		svc.Spec.SessionAffinity, svc.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
		if seconds > 0 {
			svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			svc.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
				ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds},
			}
		}
	}
}

// SourceRanges are loadBalancerSourceRanges.
func SourceRanges(ranges ...string) Change {
	return func(svc *corev1.Service) { svc.Spec.LoadBalancerSourceRanges = ranges }
}

// ExternalIPs gives a Service external IPs.
func ExternalIPs(ips ...string) Change {
	return func(svc *corev1.Service) { svc.Spec.ExternalIPs = ips }
}
